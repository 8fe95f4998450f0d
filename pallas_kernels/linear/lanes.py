"""One row times bf16 weights ``[out, in]``, given as their bits, on XLA:CPU.

XLA:CPU has no bf16 matmul for one row that uses vector instructions, and spends on two rows what it takes to convert
the weights, more than twice the time that reading them takes. Here each output is summed in ``LANES`` lanes by one
elementwise expression, which XLA compiles to a vectorised loop over the weights: load, widen, multiply, add. The lanes
are then added by a dot with ones (as a reduction, XLA's library for those would take in the whole expression, and runs
it without vectors). The weights come as integers because XLA:CPU materialises a bitcast of them, and converts bf16 one
by one. Measured on AVX2, 2 cores: 0.19 ns a weight, against 0.30 for the dot of two rows. More lanes make the last dot
slower, fewer make the expression longer: 16 compile twice as long as 32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.launch import Launcher
from pallas_kernels.linear.problem import Problem
from pallas_kernels.target import Target
from pallas_kernels.tuning import Tile

LANES = 32
SECTION = 2048  # columns of one expression: its length, and so its compile time, is bounded


def tiles(problem: Problem, target: Target) -> tuple[Tile, ...]:
    if problem.T != 1 or not problem.bits:
        raise NotImplementedError("it takes one row, and bf16 weights as integers")
    return ({},)


def run(
    problem: Problem, tile: Tile, launcher: Launcher, x: jax.Array, weight: jax.Array, bits: jax.Array
) -> jax.Array:
    """See ``api.linear``."""
    # Inside a loop XLA would widen all weights once, before it, and keep them: the barrier ties them to x.
    x, bits = lax.optimization_barrier((x.astype(jnp.float32), bits))
    sections = [slice(start, start + SECTION) for start in range(0, x.shape[1], SECTION)]
    lanes = jnp.concatenate([_lanes(x[:, s], bits[:, s]) for s in sections], axis=1)
    ones = jnp.ones(lanes.shape[1], jnp.float32)
    return lax.dot_general(lanes, ones, (((1,), (0,)), ((), ())))[None]


def _lanes(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Partial sums f32[out, LANES]: lane l holds the columns l, l + LANES, ..."""
    total = jnp.float32(0)
    for start in range(0, x.shape[1], LANES):
        part = _padded(bits[:, start : start + LANES]).astype(jnp.uint32) << 16
        total = total + lax.bitcast_convert_type(part, jnp.float32) * _padded(x[:, start : start + LANES])
    return total


def _padded(part: jax.Array) -> jax.Array:
    return jnp.pad(part, ((0, 0), (0, LANES - part.shape[1])))
