"""Grouped matmul in plain JAX: a loop over tiles of rows of one expert, as many as there are. Each takes that expert's
weight alone, so that time and memory follow the experts that have rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.moe_matmul.problem import Problem
from pallas_kernels.quant_matmul import reference

MIN_ROWS = 4  # XLA:CPU multiplies fewer rows of int8 one by one
MAX_ROWS = 128


def run(
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array | None,
    zeros: jax.Array | None,
    group_sizes: jax.Array,
) -> jax.Array:
    """See ``api.moe_matmul``."""
    p = problem
    if p.T == 0 or p.E == 0:
        return jnp.zeros((p.T, p.out), jnp.float32)
    rows = min(max(1 << (p.T // p.E).bit_length(), MIN_ROWS), MAX_ROWS)  # of a tile: most experts take one
    x = jnp.pad(x, ((0, max(0, rows - p.T)), (0, 0)))
    expert = dataclasses.replace(p.expert, T=rows)
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
        new = reference.run(expert, lax.dynamic_slice_in_dim(x, start, rows), *weight)
        row = (start + jnp.arange(rows))[:, None]
        old = lax.dynamic_slice_in_dim(y, start, rows)
        return lax.dynamic_update_slice_in_dim(y, jnp.where((row >= first) & (row < end), new, old), start, 0)

    return lax.fori_loop(0, last_tiles[-1], tile, jnp.zeros((len(x), p.out), jnp.float32))[: p.T]
