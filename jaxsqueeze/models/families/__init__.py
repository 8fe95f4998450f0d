"""Model families: which checkpoints can be read, and how each of their configs and tensors maps to ours.

A family is a mapping file, never forward code. Supporting one more means writing its ``FAMILY`` and listing it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.families import gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3, smollm3
from jaxsqueeze.models.families.family import Family
from jaxsqueeze.models.families.rules import TensorRule

__all__ = ["FAMILIES", "TensorRule", "canonical_name", "config_from_hf", "tensor_plan", "units"]

FAMILIES: tuple[Family, ...] = tuple(m.FAMILY for m in (llama, mistral, qwen2, qwen3, smollm3, gemma2, gemma3, phi3))
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
_BY_MODEL_TYPE = {name: family for family in FAMILIES for name in family.model_types}
_BY_NAME = {family.name: family for family in FAMILIES}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig from a parsed ``config.json``. ValueError says what is unknown or unsupported, and what is known."""
    architectures = hf.get("architectures") or ()
    name = architectures[0] if architectures else hf.get("model_type")
    family = _BY_ARCHITECTURE.get(name) if architectures else _BY_MODEL_TYPE.get(name)
    if family is None:
        raise ValueError(f"unknown architecture {name!r}; known: {', '.join(_BY_ARCHITECTURE)}")
    return family.config(hf)


def units(cfg: ModelConfig) -> list[str]:
    """Top-level groups of parameters, in forward order: the pieces that are converted, stored and loaded one by one."""
    tail = ["final_norm"] if cfg.tie_embeddings else ["final_norm", "lm_head"]
    return ["embed", *(f"layers_{i}" for i in range(cfg.num_layers)), *tail]


def tensor_plan(cfg: ModelConfig) -> dict[str, TensorRule]:
    """Each of our parameters (path joined by '/') to the checkpoint tensors it is made from. A tied model's plan never
    asks for ``lm_head.weight``, so it does not matter whether the checkpoint has one."""
    return _BY_NAME[cfg.family].tensor_plan(cfg)


def canonical_name(name: str) -> str:
    """The name a plan uses for a checkpoint tensor: text models inside multimodal checkpoints carry one more prefix,
    before or after ``model.`` depending on the release that wrote them."""
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")
