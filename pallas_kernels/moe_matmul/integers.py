"""Grouped matmul of few rows an expert on XLA:CPU: tile after tile by ``quant_matmul.integers``."""

from __future__ import annotations

import jax

from pallas_kernels.launch import Launcher
from pallas_kernels.moe_matmul import row_tiles
from pallas_kernels.moe_matmul.problem import Problem
from pallas_kernels.quant_matmul import integers
from pallas_kernels.target import Target
from pallas_kernels.tuning import Tile


def tiles(problem: Problem, target: Target) -> tuple[Tile, ...]:
    """Those of ``quant_matmul.integers``."""
    return integers.tiles(row_tiles.one_tile(problem), target)


def run(
    problem: Problem, tile: Tile, launcher: Launcher, x: jax.Array, *weights_and_group_sizes: jax.Array | None
) -> jax.Array:
    """See ``api.moe_matmul``."""

    def matmul(expert, *arrays):
        return integers.run(expert, tile, launcher, *arrays)

    return row_tiles.multiply(problem, matmul, x, *weights_and_group_sizes)
