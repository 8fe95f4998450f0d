"""SmolLM3: Llama with some layers left without rope (``no_rope_layers``: 1 keeps rope, 0 drops it)."""

from __future__ import annotations

from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.families import dense
from jaxsqueeze.models.families.family import Family, HfConfig


def config(hf: HfConfig) -> ModelConfig:
    hf = dense.with_defaults(
        hf,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        no_rope_layer_interval=4,
        tie_word_embeddings=True,
    )
    num_layers = dense.field(hf, "num_hidden_layers")
    every = hf["no_rope_layer_interval"]
    uses_rope = [bool(x) for x in hf.get("no_rope_layers") or [(i + 1) % every for i in range(num_layers)]]
    if len(uses_rope) < num_layers:
        raise ValueError(f"no_rope_layers has {len(uses_rope)} entries for {num_layers} layers")
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    types = dense.layer_types(hf, [window is not None and not uses_rope[i] for i in range(num_layers)])
    bias = bool(hf.get("attention_bias"))
    return dense.config(
        hf,
        "smollm3",
        types=types,
        window=window,
        theta=2_000_000.0,
        uses_rope=uses_rope,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias")),
    )


FAMILY = Family("smollm3", ("SmolLM3ForCausalLM",), ("smollm3",), config, dense.tensor_plan)
