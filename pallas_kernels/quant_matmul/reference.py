"""Matmul with quantised weights in plain JAX: codes are converted inside the dot, scales come after it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quant_matmul import packing
from pallas_kernels.quant_matmul.activations import quantise_tokens
from pallas_kernels.quant_matmul.problem import Problem

PARTIALS = 32  # tokens up to which each group's dot is scaled; with more, the weights are: there are fewer of them


def run(
    problem: Problem, x: jax.Array, codes: jax.Array, scales: jax.Array | None, zeros: jax.Array | None
) -> jax.Array:
    """See ``api.quant_matmul``."""
    if problem.format == "w8a8":
        return _integers(x, codes, scales)
    if problem.group:
        return _groups(problem, x, codes, scales, zeros)
    dtype = jnp.promote_types(x.dtype, codes.dtype) if problem.format == "bf16" else x.dtype
    y = _dot(x.astype(dtype), codes.astype(dtype))
    return y if scales is None else y * scales


def _integers(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
    x, token_scales = quantise_tokens(x)
    return _dot(x, codes, jnp.int32).astype(jnp.float32) * token_scales[:, None] * scales


def _groups(problem: Problem, x: jax.Array, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> jax.Array:
    if problem.T > PARTIALS:
        weight = packing.dequantise(codes, scales, zeros, problem.format, problem.width)
        return _dot(x, weight.astype(x.dtype))
    x = jnp.pad(x, ((0, 0), (0, problem.padded - problem.width))).reshape(problem.T, scales.shape[0], problem.group)
    u = packing.unpack(codes, problem.format) if problem.parts > 1 else codes
    if problem.format == "fp4":
        u, scales = packing.doubled_e2m1(u), scales.astype(jnp.float32) / 2
    elif problem.middle and zeros is None:
        u = u.astype(jnp.int8) - problem.middle
    u = u.reshape(problem.out, scales.shape[0], problem.group)
    dots = lax.dot_general(x, u.astype(x.dtype), (((2,), (2,)), ((1,), (1,))), preferred_element_type=jnp.float32)
    if zeros is not None:
        dots -= jnp.sum(x.astype(jnp.float32), axis=2).T[:, :, None] * zeros.astype(jnp.float32)[:, None, :]
    return jnp.sum(dots * scales.astype(jnp.float32)[:, None, :], axis=0)


def _dot(x: jax.Array, weight: jax.Array, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """XLA:CPU multiplies fewer than 2 rows of bf16 and 4 of int8 one by one."""
    rows = x.shape[0]
    if 0 < rows < 4:
        x = jnp.pad(x, ((0, 4 - rows), (0, 0)))
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)[:rows]
