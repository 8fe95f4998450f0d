"""Mistral: Llama with a sliding window in every layer (``sliding_window`` null: none)."""

from __future__ import annotations

from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.families import dense
from jaxsqueeze.models.families.family import Family, HfConfig


def config(hf: HfConfig) -> ModelConfig:
    hf = dense.with_defaults(hf, sliding_window=4096, num_key_value_heads=8, max_position_embeddings=131_072)
    window = hf["sliding_window"]
    kind = "full_attention" if window is None else "sliding_attention"
    types = [kind] * dense.field(hf, "num_hidden_layers")
    return dense.config(hf, "mistral", types=types, window=window)


FAMILY = Family("mistral", ("MistralForCausalLM",), ("mistral",), config, dense.tensor_plan)
