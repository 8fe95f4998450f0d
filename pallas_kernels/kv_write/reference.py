"""KV write in plain JAX: one scatter (two with scales), in place when the pool is donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_write.problem import Problem


def run(
    problem: Problem,
    pages: jax.Array,
    scales: jax.Array | None,
    new: jax.Array,
    page: jax.Array,
    offset: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """See ``api.kv_write``."""
    if problem.format == "bits":
        new = lax.bitcast_convert_type(new, pages.dtype)
    elif scales is not None:
        new, scale = quantise(new, problem.format)
        scales = scales.at[page, :, offset].set(scale, mode="promise_in_bounds")
    return pages.at[page, :, offset].set(new, mode="promise_in_bounds"), scales


def quantise(x: jax.Array, format: str) -> tuple[jax.Array, jax.Array]:
    """Codes [..., W] and scales f32[...] of values [..., D]."""
    top = {"int8": 127, "int4": 7}[format]
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / top
    codes = jnp.round(x / jnp.where(scale > 0, scale, 1)[..., None])
    codes = jnp.clip(codes, -top, top).astype(jnp.int8)  # a denormal scale is inexact: clip, never wrap
    if format == "int4":
        low, high = jnp.split((codes + 8).astype(jnp.uint8), 2, axis=-1)
        codes = low | high << 4
    return codes, scale


def dequantise(codes: jax.Array, scale: jax.Array, format: str) -> jax.Array:
    """Values f32[..., D] of codes [..., W] and scales f32[...]."""
    if format == "int4":
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=-1).astype(jnp.int8) - 8
    return codes.astype(jnp.float32) * scale[..., None]
