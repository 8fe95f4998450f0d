"""Grouped matmul in plain JAX: tile after tile by the plain-JAX matmul of one weight."""

from __future__ import annotations

import jax

from pallas_kernels.moe_matmul import row_tiles
from pallas_kernels.moe_matmul.problem import Problem
from pallas_kernels.quant_matmul import reference


def run(problem: Problem, x: jax.Array, *weights_and_group_sizes: jax.Array | None) -> jax.Array:
    """See ``api.moe_matmul``."""
    return row_tiles.multiply(problem, reference.run, x, *weights_and_group_sizes)
