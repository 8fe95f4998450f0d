"""Activations as int8 codes, one scale a token, for matmuls in integers."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def quantise_tokens(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes i8[T, in], ``x * (127 / max|x|)`` rounded to nearest even, and scales f32[T], ``max|x| / 127``. A token
    whose values are too small for f32 to have 127 / max|x| counts as zero."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=1, initial=0)
    inverse = 127 / largest
    codes = jnp.round(x * jnp.where(jnp.isfinite(inverse), inverse, 0)[:, None])
    return codes.astype(jnp.int8), largest * jnp.float32(1 / 127)
