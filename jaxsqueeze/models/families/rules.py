"""How one of our parameters is made from checkpoint tensors: fuse, split, reorder, or offset a norm.

Layouts (V vocabulary, H hidden, F MLP width, D head_dim, Hq and Hkv heads, G = Hq / Hkv), linear weights ``[out, in]``:

    embed/weight, lm_head/weight       [V, H]
    attn/qkv/weight                    [Hkv, G + 2, D, H]  KV head k: its query heads k*G .. k*G+G-1, then k, then v
    attn/qkv/bias                      [Hkv, G + 2, D]
    attn/o/weight, attn/o/bias         [H, Hq * D], [H]
    mlp/gate_up/weight, .../bias       [2, F, H], [2, F]   0 gate, 1 up
    mlp/down/weight, mlp/down/bias     [H, F], [H]
    every norm's scale                 [H] or [D], float32, the multiplier itself (Gemma stores it minus one)

Everything here is numpy and copies at most once: a memory-mapped source is only read while its parameter is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxsqueeze.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """``sources``: checkpoint tensor names, in the order the rule takes them. ``rule``: one of ``RULES``."""

    sources: tuple[str, ...]
    rule: str


COPY = "copy"
NORM = "norm"  # to float32
NORM_PLUS_ONE = "norm_plus_one"  # to float32, plus one
QKV = "qkv"  # q, k, v projections apart
QKV_FUSED = "qkv_fused"  # one projection: all q heads, all k heads, all v heads
STACK = "stack"  # gate, up apart
HALVES = "halves"  # one projection: gate, then up
RULES = (COPY, NORM, NORM_PLUS_ONE, QKV, QKV_FUSED, STACK, HALVES)


def param_shape(cfg: ModelConfig, path: str) -> tuple[int, ...]:
    """Shape of the parameter at ``path`` (see the module docstring)."""
    h, f, d = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    leaf = path.split("/", 1)[1] if path.startswith("layers_") else path
    shapes = {
        "embed/weight": (cfg.vocab_size, h),
        "lm_head/weight": (cfg.vocab_size, h),
        "attn/qkv/weight": (cfg.num_kv_heads, cfg.q_per_kv + 2, d, h),
        "attn/qkv/bias": (cfg.num_kv_heads, cfg.q_per_kv + 2, d),
        "attn/o/weight": (h, cfg.num_heads * d),
        "attn/o/bias": (h,),
        "attn/q_norm/scale": (d,),
        "attn/k_norm/scale": (d,),
        "mlp/gate_up/weight": (2, f, h),
        "mlp/gate_up/bias": (2, f),
        "mlp/down/weight": (h, f),
        "mlp/down/bias": (h,),
    }
    if leaf in shapes:
        return shapes[leaf]
    if leaf.endswith("norm/scale"):
        return (h,)
    raise ValueError(f"unknown parameter {path!r}")


def stored_dtype(path: str, dtype: np.dtype) -> np.dtype:
    """Type of the parameter at ``path`` in a model of ``dtype``: norm scales are always float32."""
    return np.dtype(np.float32) if path.endswith("/scale") else dtype


def rule_shapes(rule: str, cfg: ModelConfig, path: str) -> list[tuple[int, ...]]:
    """Expected shapes of the rule's sources, in their order."""
    shape = param_shape(cfg, path)
    if rule == QKV:
        return [(heads * cfg.head_dim, *shape[3:]) for heads in (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads)]
    if rule == QKV_FUSED:
        return [((cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim, *shape[3:])]
    if rule == STACK:
        return [shape[1:], shape[1:]]
    if rule == HALVES:
        return [(2 * shape[1], *shape[2:])]
    if rule in RULES:
        return [shape]
    raise ValueError(f"unknown rule {rule!r}")


def apply(rule: str, cfg: ModelConfig, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Builds one parameter from its source arrays (shapes as ``rule_shapes`` says), in their dtype; norms in float32.

    ``copy`` returns its source, not a copy of it.
    """
    if rule == COPY:
        return arrays[0]
    if rule == NORM:
        return arrays[0].astype(np.float32)
    if rule == NORM_PLUS_ONE:
        return np.float32(1.0) + arrays[0].astype(np.float32)
    if rule == QKV:
        return _interleave_heads(cfg, *arrays)
    if rule == QKV_FUSED:
        q_rows, kv_rows = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        (fused,) = arrays
        return _interleave_heads(cfg, fused[:q_rows], fused[q_rows : q_rows + kv_rows], fused[q_rows + kv_rows :])
    if rule == STACK:
        return np.stack(arrays)
    if rule == HALVES:
        return arrays[0].reshape(2, -1, *arrays[0].shape[1:])
    raise ValueError(f"unknown rule {rule!r}")


def _interleave_heads(cfg: ModelConfig, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """q ``[Hq * D, ...]``, k and v ``[Hkv * D, ...]`` to ``[Hkv, G + 2, D, ...]``."""
    kv, g, d, rest = cfg.num_kv_heads, cfg.q_per_kv, cfg.head_dim, q.shape[1:]
    out = np.empty((kv, g + 2, d, *rest), q.dtype)
    out[:, :g] = q.reshape(kv, g, d, *rest)
    out[:, g] = k.reshape(kv, d, *rest)
    out[:, g + 1] = v.reshape(kv, d, *rest)
    return out
