"""Gemma 3 text: five window layers to each full one, a rope base for each kind, RMSNorm over q and k heads.

The multimodal checkpoints (``Gemma3ForConditionalGeneration``) are read for their text model: its settings are under
``text_config``, its tensors under one more prefix (see ``families.canonical_name``).
"""

from __future__ import annotations

from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.families import dense, gemma2
from jaxsqueeze.models.families.family import Family, HfConfig


def config(hf: HfConfig) -> ModelConfig:
    if hf.get("text_config"):
        ids = {k: hf[k] for k in ("bos_token_id", "eos_token_id", "tie_word_embeddings") if hf.get(k) is not None}
        hf = {**hf["text_config"], **ids}
    hf = dense.with_defaults(
        hf,
        vocab_size=262_208,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131_072,
        query_pre_attn_scalar=256,
        sliding_window=4096,
        sliding_window_pattern=6,
        tie_word_embeddings=True,
    )
    every = hf["sliding_window_pattern"]
    types = dense.layer_types(hf, [bool((i + 1) % every) for i in range(dense.field(hf, "num_hidden_layers"))])
    return dense.config(
        {**hf, "rope_parameters": _rope_parameters(hf), "rope_scaling": None},
        "gemma3",
        types=types,
        window=hf["sliding_window"],
        qk_norm=True,
        **gemma2.shared_fields(hf),
    )


def _rope_parameters(hf: HfConfig) -> dict[str, dict]:
    """Per layer type, from either spelling; only full attention takes the old ``rope_scaling``."""
    given = hf.get("rope_parameters") or {}
    full = {**(given.get("full_attention") or {}), **(hf.get("rope_scaling") or {})}
    local = dict(given.get("sliding_attention") or {})
    full.setdefault("rope_theta", hf.get("rope_theta") or 1_000_000.0)
    local.setdefault("rope_theta", hf.get("rope_local_base_freq") or 10_000.0)
    return {"full_attention": full, "sliding_attention": local}


FAMILY = Family(
    "gemma3",
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    ("gemma3_text", "gemma3"),
    config,
    gemma2.tensor_plan,
)
