"""Config fields and tensor names that nearly all dense decoder families share (Llama's, in Hugging Face spelling)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxsqueeze.models.config import Activation, LayerConfig, ModelConfig
from jaxsqueeze.models.families import rope_fields, rules
from jaxsqueeze.models.families.rules import TensorRule

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def field(hf: Mapping[str, Any], key: str) -> Any:
    if hf.get(key) is None:
        raise ValueError(f"config.json lacks {key!r}")
    return hf[key]


def with_defaults(hf: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """``hf`` with the family's own values for the keys it leaves out."""
    return {**defaults, **hf}


def activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise ValueError(f"unsupported activation {name!r}; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def layer_types(hf: Mapping[str, Any], sliding: Sequence[bool]) -> list[str]:
    """``layer_types`` of the config, else full or sliding attention by the family's pattern ``sliding``."""
    types = hf.get("layer_types")
    types = list(types) if types else ["sliding_attention" if s else "full_attention" for s in sliding]
    unknown = sorted(set(types) - set(rope_fields.LAYER_TYPES))
    if unknown:
        raise ValueError(f"unsupported layer types {unknown}; supported: {', '.join(rope_fields.LAYER_TYPES)}")
    if len(types) != len(sliding):
        raise ValueError(f"layer_types has {len(types)} entries for {len(sliding)} layers")
    return types


def switched_window_types(hf: Mapping[str, Any]) -> tuple[list[str], int | None]:
    """Layer types and window of the Qwen families: ``use_sliding_window`` switches windows on, from layer
    ``max_window_layers`` up unless ``layer_types`` says otherwise."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    first = hf.get("max_window_layers", 28)
    sliding = [window is not None and i >= first for i in range(field(hf, "num_hidden_layers"))]
    return layer_types(hf, sliding), window


def config(
    hf: Mapping[str, Any],
    family: str,
    *,
    types: Sequence[str] | None = None,
    window: int | None = None,
    theta: float = 10_000.0,
    uses_rope: Sequence[bool] | None = None,
    **overrides: Any,
) -> ModelConfig:
    """A ModelConfig from the shared fields.

    ``types``: layer types, default all full attention; ``window``: what sliding layers see, tokens; ``theta``: the
    family's default rope base; ``uses_rope``: per layer; ``overrides``: ModelConfig fields the family sets itself.
    """
    hidden, heads = field(hf, "hidden_size"), field(hf, "num_attention_heads")
    num_layers = field(hf, "num_hidden_layers")
    head_dim = hf.get("head_dim") or hidden // heads
    types = types or ["full_attention"] * num_layers
    max_position = hf.get("max_position_embeddings", 2048)
    ropes, rope_index = rope_fields.ropes_by_layer_type(
        hf, types, head_dim=head_dim, theta=theta, max_position=max_position
    )
    eos = hf.get("eos_token_id")
    fields: dict[str, Any] = {
        "vocab_size": field(hf, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": field(hf, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "layers": tuple(
            LayerConfig(
                window=window if kind == "sliding_attention" else None,
                rope=rope_index[kind] if uses_rope is None or uses_rope[i] else None,
            )
            for i, kind in enumerate(types)
        ),
        "ropes": ropes,
        "max_position": rope_fields.extended_context(max_position, ropes),
        "norm_eps": hf.get("rms_norm_eps", 1e-6),
        "attn_scale": head_dim**-0.5,
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "bos_token_id": hf.get("bos_token_id"),
        "eos_token_ids": () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
    }
    if "activation" not in overrides:
        fields["activation"] = activation(hf.get("hidden_act", "silu"))
    return ModelConfig(family=family, **{**fields, **overrides})


def tensor_plan(cfg: ModelConfig, *, norm: str = rules.NORM, fused: bool = False) -> dict[str, TensorRule]:
    """Our parameter path to its sources. ``norm``: rule for norm scales; ``fused``: q/k/v and gate/up are one tensor
    each, as in Phi-3."""
    plan = {"embed/weight": TensorRule(("model.embed_tokens.weight",), rules.COPY)}
    for i in range(cfg.num_layers):
        ours, theirs = f"layers_{i}", f"model.layers.{i}"
        attn, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"

        def linear(path: str, names: Sequence[str], rule: str, bias: bool, ours: str = ours) -> None:
            for leaf in ("weight", "bias") if bias else ("weight",):
                plan[f"{ours}/{path}/{leaf}"] = TensorRule(tuple(f"{n}.{leaf}" for n in names), rule)

        def scale(path: str, name: str, ours: str = ours) -> None:
            plan[f"{ours}/{path}/scale"] = TensorRule((f"{name}.weight",), norm)

        if fused:
            linear("attn/qkv", [f"{attn}.qkv_proj"], rules.QKV_FUSED, cfg.qkv_bias)
            linear("mlp/gate_up", [f"{mlp}.gate_up_proj"], rules.HALVES, cfg.mlp_bias)
        else:
            linear("attn/qkv", [f"{attn}.{x}_proj" for x in "qkv"], rules.QKV, cfg.qkv_bias)
            linear("mlp/gate_up", [f"{mlp}.gate_proj", f"{mlp}.up_proj"], rules.STACK, cfg.mlp_bias)
        linear("attn/o", [f"{attn}.o_proj"], rules.COPY, cfg.o_bias)
        linear("mlp/down", [f"{mlp}.down_proj"], rules.COPY, cfg.mlp_bias)
        if cfg.qk_norm:
            scale("attn/q_norm", f"{attn}.q_norm")
            scale("attn/k_norm", f"{attn}.k_norm")
        scale("input_norm", f"{theirs}.input_layernorm")
        if cfg.post_norms:
            scale("post_attn_norm", f"{theirs}.post_attention_layernorm")
            scale("mlp_norm", f"{theirs}.pre_feedforward_layernorm")
            scale("post_mlp_norm", f"{theirs}.post_feedforward_layernorm")
        else:
            scale("mlp_norm", f"{theirs}.post_attention_layernorm")
    plan["final_norm/scale"] = TensorRule(("model.norm.weight",), norm)
    if not cfg.tie_embeddings:
        plan["lm_head/weight"] = TensorRule(("lm_head.weight",), rules.COPY)
    return plan
