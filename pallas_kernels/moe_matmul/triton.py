"""Grouped matmul on a GPU: a program computes one tile of outputs for up to ``bt`` rows of one expert, with the inner
loop of ``quant_matmul``. Which expert and rows it finds from the group sizes. There are as many programs as the worst
group sizes need; those without rows end at once.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.launch import Launch, Launcher
from pallas_kernels.moe_matmul.problem import Problem
from pallas_kernels.quant_matmul import triton as quant_matmul
from pallas_kernels.quant_matmul.tile_dot import tile_dot
from pallas_kernels.target import Target
from pallas_kernels.tuning import Tile

_TOGETHER = 8  # tiles of rows that run beside each other for all outputs: their x, and a weight they share, stay in L2


def tiles(problem: Problem, target: Target) -> tuple[Tile, ...]:
    """Those of ``quant_matmul`` for the rows that an expert has if all have the same, and for half of them, without
    splits: the experts are programs enough. Of many rows half come first: an expert's last tile is seldom full."""
    rows = max(2, triton.cdiv(problem.T, max(1, problem.E)))
    routed = min(problem.T, problem.E)
    found: list[Tile] = []
    for count in (rows, rows // 2) if rows <= 64 else (rows // 2, rows):
        alike = dataclasses.replace(problem.expert, T=count, out=routed * problem.out)
        for tile in quant_matmul.tiles(alike, target):
            bare = {name: value for name, value in tile.items() if name != "splits"}
            if bare not in found:
                found.append(bare)
    if problem.parts == 2 and target.capability < 90:  # those that spill registers come last
        many = problem.zeros and problem.group == 32
        found.sort(key=lambda tile: tile["bt"] == tile["bn"] or (many and tile["bn"] == 64))
    elif problem.group == 32 and target.capability < 90:
        found.sort(key=lambda tile: tile["bk"] > 128)
    return tuple(found)


def run(
    problem: Problem,
    tile: Tile,
    launcher: Launcher,
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array | None,
    zeros: jax.Array | None,
    group_sizes: jax.Array,
) -> jax.Array:
    """See ``api.moe_matmul``."""
    p, bt = problem, tile["bt"]
    if p.T == 0 or p.E == 0:
        return jnp.zeros((p.T, p.out), jnp.float32)
    operands, token_scales, constants = quant_matmul.prepared(p, tile, x, codes, scales, zeros)
    # Of all ways to cut T rows into groups, the most tiles: each of min(E + 1, T) groups has one row in its last tile.
    most = (p.T + min(p.E + 1, p.T) * (bt - 1)) // bt
    constants |= {
        "E": p.E,
        "EXPERTS": triton.next_power_of_2(p.E + 1),
        "SCALES": p.out * (p.padded // p.group if p.group else 1),
        "TILES": most,
        "TOGETHER": _TOGETHER,
    }
    grid = (most * triton.cdiv(p.out, tile["bn"]),)
    out = jax.ShapeDtypeStruct((p.T, p.out), jnp.float32)
    launch = Launch(_moe_matmul, grid, (out,), constants, num_warps=tile["warps"], num_stages=tile["stages"])
    (y,) = launcher(launch, *operands, group_sizes)
    if token_scales is None:
        return y
    return y * jnp.where(jnp.arange(p.T) < jnp.sum(group_sizes), token_scales, 0)[:, None]


@triton.jit
def _rows(tile, group_sizes_ptr, E: tl.constexpr, EXPERTS: tl.constexpr, T: tl.constexpr, BT: tl.constexpr):
    """Expert, first row and last row + 1 of a tile. Rows of no group are expert E's; tiles after theirs have none."""
    e = tl.arange(0, EXPERTS)
    size = tl.load(group_sizes_ptr + e, mask=e < E, other=0)
    size = tl.where(e == E, T - tl.sum(size, axis=0), size)
    count = (size + BT - 1) // BT
    expert = tl.sum((tl.cumsum(count, axis=0) <= tile).to(tl.int32), axis=0)
    start = tl.sum(tl.where(e < expert, size, 0), axis=0)
    first = start + (tile - tl.sum(tl.where(e < expert, count, 0), axis=0)) * BT
    return expert, first, start + tl.sum(tl.where(e == expert, size, 0), axis=0)


@triton.jit
def _moe_matmul(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, sums_ptr, group_sizes_ptr, out_ptr,
    E: tl.constexpr, EXPERTS: tl.constexpr, T: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    SUMS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    SPAN: tl.constexpr = TOGETHER * ((OUT + BN - 1) // BN)
    base = tl.program_id(0) // SPAN * TOGETHER
    together = min(TILES - base, TOGETHER)
    place = tl.program_id(0) % SPAN
    expert, first, end = _rows(base + place % together, group_sizes_ptr, E, EXPERTS, T, BT)
    if first < end:
        row = first.to(tl.int64) + tl.arange(0, BT)
        n = (place // together).to(tl.int64) * BN + tl.arange(0, BN)
        acc = tl.zeros((BN, BT), tl.float32)
        if expert < E:
            e = expert.to(tl.int64)
            acc = tile_dot(
                x_ptr, row, row < end, codes_ptr + e * OUT * COLUMNS, scales_ptr + e * SCALES, zeros_ptr + e * SCALES,
                tl.minimum(n, OUT - 1), 0, COLUMNS,
                OUT, WIDTH, COLUMNS, FORMAT, GROUP, ZEROS, BT, BN, BK,
                sums_ptr if SUMS else None,
            )  # fmt: skip
        mask = (row[None, :] < end) & (n[:, None] < OUT)
        tl.store(out_ptr + row[None, :] * OUT + n[:, None], acc, mask=mask)
