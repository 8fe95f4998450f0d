"""Quantised matmul on a GPU: a program computes one tile of outputs over a piece of the inputs. For few tokens these
are many pieces, so that all cores load weights; the partial sums are then added in f32, always in one order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax

from pallas_kernels.launch import Launch, Launcher
from pallas_kernels.quant_matmul.activations import group_sums, quantise_tokens
from pallas_kernels.quant_matmul.problem import Problem
from pallas_kernels.quant_matmul.tile_dot import tile_dot
from pallas_kernels.target import Target
from pallas_kernels.tuning import Tile

_FEW = 16  # tokens of a tile up to which the tensor cores sum x


def tiles(problem: Problem, target: Target) -> tuple[Tile, ...]:
    """``bt``, ``bn``, ``bk``: tokens, outputs and columns of codes of a tile; ``splits`` of the columns; ``warps``;
    ``stages``: loads in flight."""
    p = problem
    bt = min(128, max(8, triton.next_power_of_2(p.T)))
    if p.dtype == "float32":  # three operands: more registers
        shapes = [(min(bt, 32), 64, 4)]
    elif bt <= 16:
        shapes = [(bt, 64, 4), (bt, 128, 8), (bt, 128, 4), (bt, 32, 2)]
    elif bt <= 64:
        shapes = [(bt, 64, 4), (bt, 128, 8)]
        if p.group == 32 and p.zeros and p.scale_dtype == "float32":  # more registers than four warps have
            shapes.reverse()
    elif triton.cdiv(p.T, bt) * triton.cdiv(p.out, 128) < target.cores:
        shapes = [(64, 64, 4), (64, 128, 8), (128, 128, 8)]
    else:
        shapes = [(128, 128, 8), (64, 128, 8), (64, 64, 4)]
        # A scale of each group takes registers. Of these formats there are enough for the largest tile:
        few = not p.zeros or (p.group == 128 and p.scale_dtype != "float32")
        enough = {"int4": target.capability >= 90 and few, "fp8": p.group == 128}
        if p.group and not enough.get(p.format):
            shapes = shapes[1:]
    found = [_tile(p, target, *shape, row) for shape in shapes for row in (256, 128)]
    for splits in (found[0]["splits"] * 2, found[0]["splits"] // 2):
        if 1 <= splits <= triton.cdiv(p.padded // p.parts, found[0]["bk"]):
            found.append({**found[0], "splits": splits})
    return tuple(tile for i, tile in enumerate(found) if tile not in found[:i])


def _tile(p: Problem, target: Target, bt: int, bn: int, warps: int, row: int) -> Tile:
    """A tile that reads up to ``row`` bytes of each output's codes at once."""
    size, x_size = jnp.dtype(p.storage).itemsize, jnp.dtype("int8" if p.format == "w8a8" else p.dtype).itemsize
    columns = p.padded // p.parts
    bk = row // max(size, x_size // 2) // (1 if p.parts < 4 else 2)
    if bt > 16:
        bk //= 2
    room = target.shared_bytes // (3 if bt <= 16 else 2 if bt <= 64 else 1)
    stage = bn * size + bt * p.parts * x_size  # bytes for each column
    while (p.group and columns % bk) or (2 * stage * bk > room and bk > 32):
        bk //= 2
    steps = triton.cdiv(columns, bk)
    programs = triton.cdiv(p.T, bt) * triton.cdiv(p.out, bn)
    # Splits, while there are programs too few for all cores, until partial sums are as many bytes as the codes.
    splits = 1
    while 2 * splits * programs <= 4 * target.cores and 4 * splits <= steps and 16 * splits * p.T <= columns * size:
        splits *= 2
    stages = max(2, min(4, room // (stage * bk), triton.cdiv(steps, splits) + 1))
    return {"bt": bt, "bn": bn, "bk": bk, "splits": splits, "warps": warps, "stages": stages}


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
    operands, token_scales, constants = prepared(p, tile, x, codes, scales, zeros)
    splits = tile["splits"]
    constants["PIECE"] = triton.cdiv(triton.cdiv(codes.shape[1], tile["bk"]), splits) * tile["bk"]
    grid = (triton.cdiv(p.T, tile["bt"]), triton.cdiv(p.out, tile["bn"]), splits)
    out = jax.ShapeDtypeStruct((splits, p.T, p.out), jnp.float32)
    launch = Launch(_matmul, grid, (out,), constants, num_warps=tile["warps"], num_stages=tile["stages"])
    (y,) = launcher(launch, *operands)
    y = y[0] if splits == 1 else jnp.sum(y, axis=0)
    return y if token_scales is None else y * token_scales[:, None]


def prepared(
    p: Problem, tile: Tile, x: jax.Array, codes: jax.Array, scales: jax.Array | None, zeros: jax.Array | None
) -> tuple[tuple[jax.Array, ...], jax.Array | None, dict[str, Any]]:
    """What a kernel around ``tile_dot`` is launched with: x, codes, scales, zeros and sums (the codes in place of those
    that there are not); the scales of w8a8's tokens, f32[T], which its result lacks; constants."""
    token_scales = None
    if p.format == "w8a8":
        x, token_scales = quantise_tokens(x)
    if p.format == "fp8":  # Triton knows no e4m3 before sm_89
        codes = lax.bitcast_convert_type(codes, jnp.uint8)
    sums = group_sums(p, x) if p.zeros and tile["bt"] > _FEW else None
    constants = {
        "T": p.T,
        "OUT": p.out,
        "WIDTH": p.width,
        "COLUMNS": codes.shape[-1],
        "FORMAT": p.format,
        "GROUP": p.group,
        "ZEROS": p.zeros,
        "SUMS": sums is not None,
        "BT": tile["bt"],
        "BN": tile["bn"],
        "BK": tile["bk"],
    }
    return (x, codes, *(codes if a is None else a for a in (scales, zeros, sums))), token_scales, constants


@triton.jit
def _matmul(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, sums_ptr, out_ptr,
    T: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, SUMS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Tokens are the fastest dimension of the grid: all that need a tile of the weight run together."""
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    n = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    first = tl.program_id(2) * PIECE
    acc = tile_dot(
        x_ptr, row, row < T, codes_ptr, scales_ptr, zeros_ptr, tl.minimum(n, OUT - 1), first,
        tl.minimum(first + PIECE, COLUMNS), OUT, WIDTH, COLUMNS, FORMAT, GROUP, ZEROS, BT, BN, BK,
        sums_ptr if SUMS else None,
    )  # fmt: skip
    place = (tl.program_id(2) * T + row[None, :]) * OUT + n[:, None]
    tl.store(out_ptr + place, acc, mask=(row[None, :] < T) & (n[:, None] < OUT))
