"""Qwen3 dense: RMSNorm over each q and k head, head_dim of its own, no attention bias unless asked for."""

from __future__ import annotations

from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.families import dense
from jaxsqueeze.models.families.family import Family, HfConfig


def config(hf: HfConfig) -> ModelConfig:
    hf = dense.with_defaults(hf, head_dim=128, max_position_embeddings=32_768)
    types, window = dense.switched_window_types(hf)
    bias = bool(hf.get("attention_bias"))
    return dense.config(hf, "qwen3", types=types, window=window, qkv_bias=bias, o_bias=bias, qk_norm=True)


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), ("qwen3",), config, dense.tensor_plan)
