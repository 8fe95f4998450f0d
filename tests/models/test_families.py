"""Config mapping: the fields of published checkpoints, both spellings of rope settings, and what is refused."""

from __future__ import annotations

import json

import pytest

from jaxsqueeze.models import families
from jaxsqueeze.models.config import LayerConfig, ModelConfig, RopeConfig
from jaxsqueeze.models.families import config_from_hf


def llama(**fields) -> dict:
    """Llama-3.2-1B's shape, unless overridden (None drops a field)."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        **fields,
    }
    return {k: v for k, v in config.items() if v is not None}


def small(architecture: str, **fields) -> dict:
    return llama(
        architectures=[architecture],
        model_type=None,
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=8,
        num_key_value_heads=2,
        rope_theta=None,
        tie_word_embeddings=None,
        **fields,
    )


def windows(cfg: ModelConfig) -> list[int | None]:
    return [layer.window for layer in cfg.layers]


def test_llama():
    scaling = {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    cfg = config_from_hf(llama(rope_scaling=scaling))
    assert (cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.q_per_kv) == (32, 8, 64, 4)
    assert cfg.ropes == (RopeConfig(500000.0, 64, "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),)
    assert cfg.layers == (LayerConfig(window=None, rope=0),) * 16
    assert (cfg.max_position, cfg.norm_eps, cfg.activation) == (131072, 1e-5, "silu")
    assert cfg.attn_scale == 64**-0.5
    assert cfg.tie_embeddings
    assert [cfg.qkv_bias, cfg.o_bias, cfg.mlp_bias, cfg.qk_norm, cfg.post_norms] == [False] * 5
    assert (cfg.bos_token_id, cfg.eos_token_ids) == (128000, (128001, 128008, 128009))
    # The newer spelling of the same settings.
    assert config_from_hf(llama(rope_theta=None, rope_parameters={**scaling, "rope_theta": 500000.0})) == cfg


def test_llama_1_has_as_many_kv_heads_and_no_rope_fields():
    cfg = config_from_hf(
        llama(num_key_value_heads=None, rope_theta=None, tie_word_embeddings=None, eos_token_id=2, hidden_size=4096)
    )
    assert (cfg.num_kv_heads, cfg.head_dim) == (32, 128)
    assert cfg.ropes == (RopeConfig(10000.0, 128),)
    assert not cfg.tie_embeddings
    assert cfg.eos_token_ids == (2,)


def test_biases():
    cfg = config_from_hf(llama(attention_bias=True, mlp_bias=True))
    assert (cfg.qkv_bias, cfg.o_bias, cfg.mlp_bias) == (True, True, True)
    cfg = config_from_hf(small("Qwen2ForCausalLM"))
    assert (cfg.qkv_bias, cfg.o_bias, cfg.mlp_bias) == (True, False, False)
    cfg = config_from_hf(small("Qwen3ForCausalLM", attention_bias=True))
    assert (cfg.qkv_bias, cfg.o_bias, cfg.mlp_bias) == (True, True, False)


@pytest.mark.parametrize(
    ("scaling", "kind", "max_position"),
    [
        ({"type": "linear", "factor": 2.5}, "linear", 2048),
        ({"type": "dynamic", "factor": 2.0}, "dynamic", 4096),  # serves past the trained length
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, "yarn", 8192),
        ({"rope_type": "yarn", "type": "linear", "factor": 1.5}, "yarn", 3072),  # rope_type wins
        (None, "default", 2048),
    ],
)
def test_rope_scaling_by_old_names(scaling, kind, max_position):
    cfg = config_from_hf(llama(max_position_embeddings=2048, rope_scaling=scaling))
    (rope,) = cfg.ropes
    assert (rope.kind, rope.theta, cfg.max_position) == (kind, 500000.0, max_position)
    assert rope.factor == (scaling or {}).get("factor", 1.0)
    assert rope.original_max_len == (2048 if kind in ("dynamic", "yarn") else 0)


def test_mistral():
    # 7B-v0.1 has the window, v0.2 and later set it to null; Nemo has 32 heads of 128 on a hidden size of 5120.
    assert windows(config_from_hf(small("MistralForCausalLM", sliding_window=12))) == [12] * 4
    assert windows(config_from_hf(small("MistralForCausalLM"))) == [4096] * 4
    nemo = small("MistralForCausalLM", sliding_window=1, head_dim=128) | {"sliding_window": None, "hidden_size": 5120}
    cfg = config_from_hf(nemo)
    assert windows(cfg) == [None] * 4
    assert (cfg.head_dim, cfg.attn_scale) == (128, 128**-0.5)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_windows(architecture):
    off = small(architecture, sliding_window=32, max_window_layers=2, use_sliding_window=False)
    assert windows(config_from_hf(off)) == [None] * 4
    on = {**off, "use_sliding_window": True}
    assert windows(config_from_hf(on)) == [None, None, 32, 32]
    full, local = "full_attention", "sliding_attention"
    assert windows(config_from_hf({**on, "layer_types": [local, full, full, local]})) == [32, None, None, 32]


def test_qwen3():
    cfg = config_from_hf(small("Qwen3ForCausalLM"))
    assert cfg.qk_norm
    assert cfg.head_dim == 128  # the family's own default, not hidden / heads
    assert not cfg.qkv_bias


def test_smollm3():
    cfg = config_from_hf(small("SmolLM3ForCausalLM"))
    assert [layer.rope for layer in cfg.layers] == [0, 0, 0, None]  # every fourth
    assert cfg.ropes == (RopeConfig(2000000.0, 8),)
    assert cfg.tie_embeddings
    cfg = config_from_hf(small("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 0, 1], sliding_window=5))
    assert [layer.rope for layer in cfg.layers] == [None, 0, 0, None]
    assert windows(cfg) == [None] * 4
    cfg = config_from_hf(small("SmolLM3ForCausalLM", sliding_window=5, use_sliding_window=True))
    assert windows(cfg) == [None, None, None, 5]


def test_gemma2():
    cfg = config_from_hf(small("Gemma2ForCausalLM", hidden_act="gelu_pytorch_tanh", query_pre_attn_scalar=144))
    assert windows(cfg) == [4096, None, 4096, None]
    assert (cfg.attn_softcap, cfg.final_softcap) == (50.0, 30.0)
    assert (cfg.head_dim, cfg.attn_scale, cfg.embed_scale) == (256, 144**-0.5, 8.0)
    assert (cfg.activation, cfg.post_norms, cfg.tie_embeddings, cfg.qk_norm) == ("gelu_tanh", True, True, False)
    assert len(cfg.ropes) == 1
    assert [(g.name, g.layers) for g in cfg.cache_groups()] == [("full", (1, 3)), ("window4096", (0, 2))]


def gemma3_270m(**fields) -> dict:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "bos_token_id": 2,
        "eos_token_id": 1,
        **fields,
    }


def test_gemma3():
    cfg = config_from_hf(gemma3_270m())
    assert windows(cfg) == ([512] * 5 + [None]) * 3
    assert {layer.window: cfg.ropes[layer.rope].theta for layer in cfg.layers} == {512: 10000.0, None: 1000000.0}
    assert (cfg.qk_norm, cfg.post_norms, cfg.tie_embeddings, cfg.activation) == (True, True, True, "gelu_tanh")
    assert (cfg.attn_softcap, cfg.final_softcap, cfg.embed_scale) == (None, None, 640**0.5)
    nested = {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    new = gemma3_270m(rope_parameters=nested)
    for key in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
        del new[key]
    assert config_from_hf(new) == cfg
    alternate = ["full_attention", "sliding_attention"] * 9
    assert windows(config_from_hf(gemma3_270m(layer_types=alternate))) == [None, 512] * 9


def test_gemma3_scales_only_the_full_layers_and_reads_text_config():
    # The 4B's config.json: most of the text model's settings are left to the defaults.
    cfg = config_from_hf(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        }
    )
    assert (cfg.vocab_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim) == (262208, 8, 4, 256)
    kinds = {layer.window: cfg.ropes[layer.rope] for layer in cfg.layers}
    assert (kinds[None].kind, kinds[None].factor, kinds[None].theta) == ("linear", 8.0, 1000000.0)
    assert (kinds[1024].kind, kinds[1024].theta) == ("default", 10000.0)
    assert cfg.eos_token_ids == (1, 106)


def phi3(**fields) -> dict:
    return small("Phi3ForCausalLM", max_position_embeddings=131072, original_max_position_embeddings=4096, **fields)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi3_longrope_by_any_of_its_names(name):
    scaling = {"type": name, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    cfg = config_from_hf(phi3(rope_scaling=scaling))
    assert cfg.ropes == (
        RopeConfig(
            10000.0,
            8,
            "longrope",
            factor=32.0,
            original_max_len=4096,
            short_factor=(1.0, 1.1, 1.2, 1.3),
            long_factor=(2.0, 3.0, 4.0, 5.0),
        ),
    )
    assert cfg.max_position == 131072
    assert windows(cfg) == [None] * 4
    assert windows(config_from_hf(phi3(sliding_window=2047))) == [2047] * 4


def test_phi3_partial_rotary():
    # As Phi-4-mini: 24 heads of 128, three quarters of which rotate.
    fields = {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75}
    cfg = config_from_hf(phi3() | fields)
    assert (cfg.head_dim, cfg.ropes[0].rotary_dim) == (128, 96)
    cfg = config_from_hf(phi3() | {**fields, "partial_rotary_factor": None})
    assert cfg.ropes[0].rotary_dim == 128  # absent: the model's default, all of it


def test_every_golden_config_survives_json(golden):
    assert ModelConfig.from_json(json.loads(json.dumps(golden.cfg.to_json()))) == golden.cfg


def test_explicit_head_dim_counts():
    cfg = config_from_hf(llama(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=8))
    plan = families.tensor_plan(cfg)
    rule = plan["layers_0/attn/qkv/weight"]
    shapes = families.rules.rule_shapes(rule.rule, cfg, "layers_0/attn/qkv/weight")
    assert dict(zip(rule.sources, shapes, strict=True)) == {
        "model.layers.0.self_attn.q_proj.weight": (16, 8),
        "model.layers.0.self_attn.k_proj.weight": (8, 8),
        "model.layers.0.self_attn.v_proj.weight": (8, 8),
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            llama(architectures=["MambaForCausalLM"]),
            r"unknown architecture 'MambaForCausalLM'; known: .*LlamaForCausalLM.*Phi3",
        ),
        (
            llama(architectures=["LlamaForSequenceClassification"]),
            "unknown architecture 'LlamaForSequenceClassification'",
        ),
        (llama(architectures=None, model_type="rwkv"), "unknown architecture 'rwkv'"),
        ({}, "unknown architecture None"),
        (
            llama(rope_scaling={"rope_type": "proportional"}),
            r"rope type 'proportional'; supported: default, linear, .*yarn",
        ),
        (llama(rope_scaling={"type": "linear"}), "'linear' needs 'factor'"),
        (
            llama(rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
            "must have 32 values, got 1",
        ),
        (llama(hidden_act="relu"), "unsupported activation 'relu'"),
        (llama(hidden_size=None), "lacks 'hidden_size'"),
        (llama(num_key_value_heads=5), "num_heads 32 is not a multiple of num_kv_heads 5"),
        (small("Qwen2ForCausalLM", layer_types=["chunked_attention"] * 4), "chunked_attention"),
        (small("Gemma2ForCausalLM", layer_types=["full_attention"]), "1 entries for 4 layers"),
        (gemma3_270m(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (small("SmolLM3ForCausalLM", no_rope_layers=[1, 0]), "2 entries for 4 layers"),
        (llama(head_dim=9), "rotary dimension must be even"),
    ],
)
def test_refused(config, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(config)


def test_model_type_names_the_family_when_architectures_is_missing():
    assert config_from_hf(llama(architectures=None)).family == "llama"
