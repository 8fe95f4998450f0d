"""Few tokens times int8, int4, fp4 or int2 weights on XLA:CPU, in integers: an e2m1 is half of one.

XLA:CPU multiplies int8 by int8 several times faster than it converts int8 weights to floats, which it would have to
materialise too. So x is written in int8 digits (``activations.digits``), each digit as rows of their own in one int8
matmul: the codes are read once, as they are. x of 16 bits has two digits, and an error of at most 2^-16 of a token's
largest value, which has one of 2^-9 (bf16) itself; f32 has three.

Groups are summed in a loop, each unpacked, multiplied and scaled by itself: no weight is ever unpacked as a whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.launch import Launcher
from pallas_kernels.quant_matmul import packing
from pallas_kernels.quant_matmul.activations import digits
from pallas_kernels.quant_matmul.problem import Problem
from pallas_kernels.target import Target
from pallas_kernels.tuning import Tile

MOST = 32  # tokens; with more, converting the weight once is quicker


def tiles(problem: Problem, target: Target) -> tuple[Tile, ...]:
    if problem.format not in ("int8", "int4", "fp4", "int2") or problem.T > MOST:
        raise NotImplementedError(f"it takes integer codes and up to {MOST} tokens")
    return ({},)


def run(
    problem: Problem,
    tile: Tile,
    launcher: Launcher,
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
) -> jax.Array:
    """See ``api.quant_matmul``."""
    p = problem
    x_DTI, weights_D, token_scales_T = digits(x, 3 if p.dtype == "float32" else 2)
    rows = jnp.concatenate(list(x_DTI))
    if rows.shape[0] < 4:  # XLA:CPU multiplies fewer rows one by one
        rows = jnp.pad(rows, ((0, 4 - rows.shape[0]), (0, 0)))
    y = _groups(p, rows, codes, scales, zeros) if p.group else _dot(rows, codes) * scales
    y = y[: len(weights_D) * p.T].reshape(len(weights_D), p.T, p.out)
    return sum(y[i] * weight for i, weight in enumerate(weights_D)) * token_scales_T[:, None]


def _groups(p: Problem, x: jax.Array, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> jax.Array:
    """f32[rows, out]"""
    x = jnp.pad(x, ((0, 0), (0, p.padded - p.width)))
    columns, bits = codes.shape[1], 8 // p.parts

    def values(packed: jax.Array, part: int) -> jax.Array:
        """i8: of fp4 twice the values."""
        if p.format == "int8":
            return packed
        u = packed >> (bits * part) & (2**bits - 1)
        return packing.doubled_e2m1(u) if p.format == "fp4" else u.astype(jnp.int8) - p.middle

    def add(i: jax.Array, y: jax.Array) -> jax.Array:
        packed = lax.dynamic_slice_in_dim(codes, i * p.group, p.group, axis=1)
        for part in range(p.parts):
            at = part * columns + i * p.group
            group = at // p.group
            x_group = lax.dynamic_slice_in_dim(x, at, p.group, axis=1)
            dots = _dot(x_group, values(packed, part))
            if zeros is not None:
                sums = jnp.sum(x_group, axis=1, dtype=jnp.int32).astype(jnp.float32)
                dots -= sums[:, None] * (zeros[group].astype(jnp.float32) - p.middle)
            y += dots * scales[group].astype(jnp.float32)
        return y

    y = lax.fori_loop(0, columns // p.group, add, jnp.zeros((x.shape[0], p.out), jnp.float32))
    return y / 2 if p.format == "fp4" else y


def _dot(x: jax.Array, codes: jax.Array) -> jax.Array:
    return lax.dot_general(x, codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32).astype(jnp.float32)
