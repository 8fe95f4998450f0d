"""Llama 1 to 3.x, and models of the same shape (SmolLM 1 and 2, Yi)."""

from __future__ import annotations

from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.families import dense
from jaxsqueeze.models.families.family import Family, HfConfig


def config(hf: HfConfig) -> ModelConfig:
    bias = bool(hf.get("attention_bias"))
    return dense.config(hf, "llama", qkv_bias=bias, o_bias=bias, mlp_bias=bool(hf.get("mlp_bias")))


FAMILY = Family("llama", ("LlamaForCausalLM",), ("llama",), config, dense.tensor_plan)
