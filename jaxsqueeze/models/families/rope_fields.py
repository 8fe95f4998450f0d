"""Reads rotary-embedding settings from ``config.json``, in both spellings.

Old: ``rope_theta``, ``partial_rotary_factor`` and ``rope_scaling`` (type under ``rope_type`` or ``type``) at the top.
New (transformers 5): one ``rope_parameters`` mapping, or one per layer type under its name. Where both are present
``rope_scaling`` wins, as in the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from jaxsqueeze.models.config import RopeConfig, RopeKind

LAYER_TYPES = ("full_attention", "sliding_attention")
_ALIASES = {"su": "longrope", "ntk": "dynamic", "none": "default"}


def rope_config(
    hf: Mapping[str, Any], params: Mapping[str, Any], *, head_dim: int, theta: float, max_position: int
) -> RopeConfig:
    """One rotary embedding from its own ``params``; fields missing there are looked up at the top of ``hf``.

    ``theta``: the family's default base; ``max_position``: context length. ValueError for an unsupported type.
    """
    kind = params.get("rope_type") or params.get("type") or "default"
    kind = _ALIASES.get(kind, kind)
    if kind not in get_args(RopeKind):
        raise ValueError(f"unsupported rope type {kind!r}; supported: {', '.join(get_args(RopeKind))}")

    def first(key: str, default: Any) -> Any:
        return next((src[key] for src in (params, hf) if src.get(key) is not None), default)

    def need(key: str) -> Any:
        if params.get(key) is None:
            raise ValueError(f"rope type {kind!r} needs {key!r} in config.json")
        return params[key]

    rotary_dim = int(head_dim * float(first("partial_rotary_factor", 1.0)))
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary dimension must be even and positive, got {rotary_dim} (head_dim {head_dim})")
    # Phi-3 keeps the trained length beside the rope settings, and that one counts.
    original = hf.get("original_max_position_embeddings") or params.get("original_max_position_embeddings")
    fields: dict[str, Any] = {}
    if kind in ("linear", "dynamic", "llama3"):
        fields["factor"] = float(need("factor"))
    if kind == "dynamic":
        fields["original_max_len"] = max_position
    if kind in ("llama3", "yarn", "longrope"):
        fields["original_max_len"] = int(original or max_position)
    if kind == "llama3":
        fields |= {k: float(need(k)) for k in ("low_freq_factor", "high_freq_factor")}
    if kind in ("yarn", "longrope"):
        fields["factor"] = float(params.get("factor") or max_position / fields["original_max_len"])
        if params.get("attention_factor") is not None:
            fields["attention_factor"] = float(params["attention_factor"])
    if kind == "yarn":
        fields |= {k: float(params[k]) for k in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim") if params.get(k)}
        fields["truncate"] = bool(params.get("truncate", True))
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            fields[key] = tuple(float(x) for x in need(key))
            if len(fields[key]) != rotary_dim // 2:
                raise ValueError(f"{key} must have {rotary_dim // 2} values, got {len(fields[key])}")
    return RopeConfig(theta=float(first("rope_theta", theta)), rotary_dim=rotary_dim, kind=kind, **fields)


def ropes_by_layer_type(
    hf: Mapping[str, Any], layer_types: Sequence[str], *, head_dim: int, theta: float, max_position: int
) -> tuple[tuple[RopeConfig, ...], dict[str, int]]:
    """The distinct rotary embeddings, and which of them each layer type uses."""
    params = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    nested = any(name in params for name in LAYER_TYPES)
    ropes: list[RopeConfig] = []
    index: dict[str, int] = {}
    for layer_type in dict.fromkeys(layer_types):
        own = (params.get(layer_type) or {}) if nested else params
        rope = rope_config(hf, own, head_dim=head_dim, theta=theta, max_position=max_position)
        if rope not in ropes:
            ropes.append(rope)
        index[layer_type] = ropes.index(rope)
    return tuple(ropes), index


def extended_context(max_position: int, ropes: Sequence[RopeConfig]) -> int:
    """Context length the checkpoint can serve: dynamic and YaRN scaling go past ``max_position_embeddings``."""
    return max([max_position, *(int(r.original_max_len * r.factor) for r in ropes if r.kind in ("dynamic", "yarn"))])
