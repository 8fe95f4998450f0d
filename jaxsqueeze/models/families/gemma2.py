"""Gemma 2: alternating windows, soft-capped attention and logits, norms on both sides of each block."""

from __future__ import annotations

import functools
from typing import Any

from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.families import dense, rules
from jaxsqueeze.models.families.family import Family, HfConfig

# Norm scales are stored minus one.
tensor_plan = functools.partial(dense.tensor_plan, norm=rules.NORM_PLUS_ONE)


def shared_fields(hf: HfConfig) -> dict[str, Any]:
    """ModelConfig fields that Gemma 2 and 3 set the same way."""
    if hf.get("use_bidirectional_attention"):
        raise ValueError("unsupported: use_bidirectional_attention (this engine decodes causally)")
    bias = bool(hf.get("attention_bias"))
    return {
        "activation": dense.activation(hf.get("hidden_activation") or "gelu_pytorch_tanh"),
        "attn_scale": float(hf["query_pre_attn_scalar"]) ** -0.5,
        "embed_scale": dense.field(hf, "hidden_size") ** 0.5,
        "final_softcap": hf.get("final_logit_softcapping"),
        "post_norms": True,
        "qkv_bias": bias,
        "o_bias": bias,
    }


def config(hf: HfConfig) -> ModelConfig:
    hf = dense.with_defaults(
        hf,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=8192,
        query_pre_attn_scalar=256,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
    )
    types = dense.layer_types(hf, [i % 2 == 0 for i in range(dense.field(hf, "num_hidden_layers"))])
    return dense.config(
        hf,
        "gemma2",
        types=types,
        window=hf["sliding_window"],
        attn_softcap=hf["attn_logit_softcapping"],
        **shared_fields(hf),
    )


FAMILY = Family("gemma2", ("Gemma2ForCausalLM",), ("gemma2",), config, tensor_plan)
