"""Rotary position embedding (Su et al. 2021) and its context-extension schemes, one set of frequencies per server.

The frequencies of some schemes depend on the length served. Mixing two sets in one KV cache gives silently wrong
attention, so the served ``max_len`` (tokens) alone fixes them: longrope takes its short factors up to the
trained length and its long ones past it, dynamic NTK takes the base of ``max_len``.

Pairs are half split: ``(i, i + rotary_dim / 2)``; dims from ``rotary_dim`` on pass through. Frequencies are
computed in float64 and rounded once; angles, cos and sin are float32.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxsqueeze.models.config import RopeConfig


def inv_freq(rope: RopeConfig, max_len: int) -> np.ndarray:
    """f32[rotary_dim / 2], radians per token."""
    return _inv_freq(rope, max_len).astype(np.float32)


def attention_scale(rope: RopeConfig, max_len: int) -> float:
    """What cos and sin are multiplied by (YaRN and longrope; 1 otherwise). Independent of ``max_len`` so far."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    if rope.kind == "longrope":
        return math.sqrt(1.0 + math.log(rope.factor) / math.log(rope.original_max_len))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def cos_sin(rope: RopeConfig, max_len: int, positions_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, f32[T, rotary_dim / 2] each, already scaled by ``attention_scale``."""
    angles = positions_T.astype(jnp.float32)[:, None] * inv_freq(rope, max_len)
    scale = attention_scale(rope, max_len)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates ``x [..., D]`` by ``cos``, ``sin`` ``[..., rotary_dim / 2]`` in float32; returns x's dtype."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    first32, second32 = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = [first32 * cos - second32 * sin, second32 * cos + first32 * sin]
    return jnp.concatenate([*(r.astype(x.dtype) for r in rotated), rest], axis=-1)


def _inv_freq(rope: RopeConfig, max_len: int) -> np.ndarray:
    dim, theta = rope.rotary_dim, rope.theta
    exponent = np.arange(0, dim, 2, dtype=np.float64) / dim
    if rope.kind == "dynamic":
        # bloc97 and emozilla's NTK scaling: nothing changes up to the trained length.
        stretch = rope.factor * max(max_len, rope.original_max_len) / rope.original_max_len - (rope.factor - 1.0)
        theta *= stretch ** (dim / (dim - 2))
    plain = theta**-exponent
    if rope.kind in ("default", "dynamic"):
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    if rope.kind == "longrope":
        factors = rope.short_factor if max_len <= rope.original_max_len else rope.long_factor
        return plain / np.asarray(factors, np.float64)
    raise ValueError(f"unsupported rope type {rope.kind!r}")


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Llama 3.1: long wavelengths divided by ``factor``, short ones kept, a linear blend between."""
    turns = rope.original_max_len * plain / (2 * math.pi)  # full turns within the trained length
    keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return plain * (keep + (1.0 - keep) / rope.factor)


def _yarn(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """YaRN (Peng et al. 2023): dims that turn more than ``beta_fast`` times within the trained length are kept, those
    under ``beta_slow`` divided by ``factor``, with a ramp over the dims between."""

    def dim_of(turns: float) -> float:
        return rope.rotary_dim * math.log(rope.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low or 0.001  # a step where both bounds fall on one dim
    divided = np.clip((np.arange(rope.rotary_dim // 2) - low) / width, 0.0, 1.0)
    return plain * (divided / rope.factor + 1.0 - divided)
