"""Random arrays of any size, quickly: a block of numpy's, and for more than that the block again and again, from a
place that depends on the seed. No period of it is a row's, and no cache or memory of a device sees through it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 4_194_301  # elements; a prime: a row's length never divides it


def uniform(seed: int, shape: tuple[int, ...], dtype: Any, low: float, high: float) -> jax.Array:
    """Between ``low`` and ``high``; of at most BLOCK elements."""
    return jnp.asarray(np.random.default_rng(seed).uniform(low, high, shape).astype(dtype))


def values(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    """All values of an integer type; of a float type, normal ones of standard deviation ``scale``."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return _normal(seed, shape, dtype, scale)
    if math.prod(shape) <= BLOCK:
        raw = np.random.default_rng(seed).bytes(math.prod(shape) * dtype.itemsize)
        return jnp.asarray(np.frombuffer(raw, dtype).reshape(shape))
    return _repeated(_code_block(dtype), seed * 7919, 1, shape, dtype)


def _normal(seed: int, shape: tuple[int, ...], dtype: jnp.dtype, scale: float) -> jax.Array:
    if math.prod(shape) <= BLOCK:
        x = np.random.default_rng(seed).standard_normal(shape, np.float32)
        return jnp.asarray((x * np.float32(scale)).astype(dtype))
    return _repeated(_normal_block(), seed * 7919, scale, shape, dtype)


@functools.cache
def _normal_block() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(BLOCK, np.float32))


@functools.cache
def _code_block(dtype: jnp.dtype) -> jax.Array:
    return jnp.asarray(np.frombuffer(np.random.default_rng(0).bytes(BLOCK * dtype.itemsize), dtype))


@functools.partial(jax.jit, static_argnums=(3, 4))
def _repeated(block: jax.Array, start: int, scale: float, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    place = (jnp.arange(math.prod(shape), dtype=jnp.uint32) + jnp.uint32(start)) % jnp.uint32(BLOCK)
    values = block[place]
    return (values * scale if jnp.issubdtype(values.dtype, jnp.floating) else values).astype(dtype).reshape(shape)
