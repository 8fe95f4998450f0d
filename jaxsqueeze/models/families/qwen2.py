"""Qwen2 and 2.5: bias on q, k and v only; windows in the upper layers when switched on."""

from __future__ import annotations

from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.families import dense
from jaxsqueeze.models.families.family import Family, HfConfig


def config(hf: HfConfig) -> ModelConfig:
    hf = dense.with_defaults(hf, max_position_embeddings=32_768)
    types, window = dense.switched_window_types(hf)
    return dense.config(hf, "qwen2", types=types, window=window, qkv_bias=True)


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), ("qwen2",), config, dense.tensor_plan)
