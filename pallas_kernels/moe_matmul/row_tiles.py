"""Grouped matmul as a loop over tiles of rows of one expert, as many as there are. Each takes that expert's weight
alone, so that time and memory follow the experts that have rows. Implementations differ in how a tile is multiplied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.moe_matmul.problem import Problem
from pallas_kernels.quant_matmul import problem as quant_matmul

MIN_ROWS = 4  # XLA:CPU multiplies fewer rows of int8 one by one
MAX_ROWS = 128


def one_tile(problem: Problem) -> quant_matmul.Problem:
    """The matmul of a tile. Most experts take one."""
    rows = 1 << (problem.T // max(1, problem.E)).bit_length()
    return dataclasses.replace(problem.expert, T=min(max(rows, MIN_ROWS), MAX_ROWS))


def multiply(
    problem: Problem,
    matmul: Callable[..., jax.Array],  # (one_tile(problem), x, codes, scales, zeros) -> f32[rows, out]
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array | None,
    zeros: jax.Array | None,
    group_sizes: jax.Array,
) -> jax.Array:
    """See ``api.moe_matmul``."""
    p, expert = problem, one_tile(problem)
    rows = expert.T
    if p.T == 0 or p.E == 0:
        return jnp.zeros((p.T, p.out), jnp.float32)
    x = jnp.pad(x, ((0, max(0, rows - p.T)), (0, 0)))
    ends = jnp.cumsum(group_sizes)
    last_tiles = jnp.cumsum(-(-group_sizes // rows))

    def tile(i: jax.Array, y: jax.Array) -> jax.Array:
        e = jnp.searchsorted(last_tiles, i, side="right")
        end = ends[e]
        first = end - group_sizes[e] + (i - last_tiles[e] + -(-group_sizes[e] // rows)) * rows
        start = jnp.minimum(first, len(x) - rows)
        # Tied to the step, all experts' weights are not converted before the loop, where XLA:CPU needs another type.
        _, *weights = lax.optimization_barrier((i, codes, scales, zeros))
        weight = (None if a is None else lax.dynamic_index_in_dim(a, e, keepdims=False) for a in weights)
        new = matmul(expert, lax.dynamic_slice_in_dim(x, start, rows), *weight)
        row = (start + jnp.arange(rows))[:, None]
        old = lax.dynamic_slice_in_dim(y, start, rows)
        return lax.dynamic_update_slice_in_dim(y, jnp.where((row >= first) & (row < end), new, old), start, 0)

    return lax.fori_loop(0, last_tiles[-1], tile, jnp.zeros((len(x), p.out), jnp.float32))[: p.T]
