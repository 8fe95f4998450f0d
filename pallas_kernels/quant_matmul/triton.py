"""Quantised matmul on a GPU: a program computes one tile of outputs over a piece of the inputs. For few tokens these
are many pieces, so that all cores load weights; the partial sums are then added in f32, always in one order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax

from pallas_kernels.launch import Launch, Launcher
from pallas_kernels.quant_matmul.activations import quantise_tokens
from pallas_kernels.quant_matmul.problem import Problem
from pallas_kernels.quant_matmul.tile_dot import tile_dot
from pallas_kernels.target import Target
from pallas_kernels.tuning import Tile


def tiles(problem: Problem, target: Target) -> tuple[Tile, ...]:
    """``bt``, ``bn``, ``bk``: tokens, outputs and columns of codes of a tile; ``splits`` of the columns; ``warps``;
    ``stages`` of loads in flight."""
    return ({"bt": 16, "bn": 64, "bk": problem.group or 128, "splits": 1, "warps": 4, "stages": 3},)


def run(
    problem: Problem,
    tile: Tile,
    launcher: Launcher,
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array | None,
    zeros: jax.Array | None,
) -> jax.Array:
    """See ``api.quant_matmul``."""
    p = problem
    if p.T == 0:
        return jnp.zeros((0, p.out), jnp.float32)
    token_scales = None
    if p.format == "w8a8":
        x, token_scales = quantise_tokens(x)
    if p.format == "fp8":  # Triton knows no e4m3 before sm_89
        codes = lax.bitcast_convert_type(codes, jnp.uint8)
    columns, splits = codes.shape[1], tile["splits"]
    constants = {
        "T": p.T,
        "OUT": p.out,
        "WIDTH": p.width,
        "COLUMNS": columns,
        "FORMAT": p.format,
        "GROUP": p.group,
        "ZEROS": p.zeros,
        "BT": tile["bt"],
        "BN": tile["bn"],
        "BK": tile["bk"],
        "PIECE": triton.cdiv(triton.cdiv(columns, tile["bk"]), splits) * tile["bk"],
    }
    grid = (triton.cdiv(p.T, tile["bt"]), triton.cdiv(p.out, tile["bn"]), splits)
    out = jax.ShapeDtypeStruct((splits, p.T, p.out), jnp.float32)
    launch = Launch(_matmul, grid, (out,), constants, num_warps=tile["warps"], num_stages=tile["stages"])
    (y,) = launcher(launch, x, codes, codes if scales is None else scales, codes if zeros is None else zeros)
    y = y[0] if splits == 1 else jnp.sum(y, axis=0)
    return y if token_scales is None else y * token_scales[:, None]


@triton.jit
def _matmul(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, out_ptr,
    T: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Tokens are the fastest dimension of the grid: all that need a tile of the weight run together."""
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    n = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    first = tl.program_id(2) * PIECE
    acc = tile_dot(
        x_ptr, row, row < T, codes_ptr, scales_ptr, zeros_ptr, tl.minimum(n, OUT - 1), first,
        tl.minimum(first + PIECE, COLUMNS), OUT, WIDTH, COLUMNS, FORMAT, GROUP, ZEROS, BT, BN, BK,
    )  # fmt: skip
    place = (tl.program_id(2) * T + row[None, :]) * OUT + n[:, None]
    tl.store(out_ptr + place, acc, mask=(row[None, :] < T) & (n[:, None] < OUT))
