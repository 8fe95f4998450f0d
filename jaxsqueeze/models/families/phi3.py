"""Phi-3 and 3.5, Phi-4-mini: fused projections, longrope, rotary over part of the head."""

from __future__ import annotations

import functools

from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.families import dense
from jaxsqueeze.models.families.family import Family, HfConfig


def config(hf: HfConfig) -> ModelConfig:
    hf = dense.with_defaults(hf, max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5)
    for key in ("rope_scaling", "rope_parameters"):
        # First releases called longrope by other names.
        kind = (hf.get(key) or {}).get("rope_type") or (hf.get(key) or {}).get("type")
        if kind in ("su", "yarn"):
            hf[key] = {**hf[key], "rope_type": "longrope"}
    window = hf.get("sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    types = [kind] * dense.field(hf, "num_hidden_layers")
    return dense.config(hf, "phi3", types=types, window=window)


FAMILY = Family("phi3", ("Phi3ForCausalLM",), ("phi3",), config, functools.partial(dense.tensor_plan, fused=True))
