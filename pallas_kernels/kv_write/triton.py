"""KV write on a GPU: one program for each token and a block of heads; values are read once, codes written once."""

from __future__ import annotations

import jax
import triton
import triton.language as tl

from pallas_kernels.kv_write.problem import Problem
from pallas_kernels.launch import Launch, Launcher
from pallas_kernels.target import Target
from pallas_kernels.tuning import Tile


def tiles(problem: Problem, target: Target) -> tuple[Tile, ...]:
    """``heads``: KV heads of a program; ``warps``."""
    if problem.format == "bits":
        raise NotImplementedError("pools of bit patterns exist on CPU only")
    heads = triton.next_power_of_2(problem.K)
    width = triton.next_power_of_2(problem.D)
    sizes = {min(heads, max(1, n // width)) for n in (256, 512, 1024, 2048)}
    return tuple({"heads": n, "warps": max(1, min(4, n * width // 256))} for n in sorted(sizes, reverse=True))


def run(
    problem: Problem,
    tile: Tile,
    launcher: Launcher,
    pages: jax.Array,
    scales: jax.Array | None,
    new: jax.Array,
    page: jax.Array,
    offset: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """See ``api.kv_write``."""
    p = problem
    constants = {
        "K": p.K,
        "D": p.D,
        "PAGE": p.page_size,
        "HEADS": tile["heads"],
        "WIDTH": triton.next_power_of_2(p.width),
    }
    grid = (p.T, triton.cdiv(p.K, tile["heads"]))
    options = {"num_warps": tile["warps"], "num_stages": 1}
    if p.T == 0:
        return pages, scales
    out = jax.ShapeDtypeStruct(pages.shape, pages.dtype)
    if scales is None:
        launch = Launch(_write, grid, (out,), constants, **options, aliases={3: 0})
        return *launcher(launch, new, page, offset, pages), None
    kernel = {"int8": _write_int8, "int4": _write_int4}[p.format]
    outs = out, jax.ShapeDtypeStruct(scales.shape, scales.dtype)
    return launcher(
        Launch(kernel, grid, outs, constants, **options, aliases={3: 0, 4: 1}), new, page, offset, pages, scales
    )


@triton.jit
def _place(page_ptr, offset_ptr, K: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr):
    """Token, heads, and the pool's row of each: [page, head, offset] counted in rows."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    page = tl.load(page_ptr + token).to(tl.int64)
    return token, head, (page * K + head) * PAGE + tl.load(offset_ptr + token)


@triton.jit
def _write(
    new_ptr, page_ptr, offset_ptr, _, pages_ptr,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, head, row = _place(page_ptr, offset_ptr, K, PAGE, HEADS)
    d = tl.arange(0, WIDTH)
    mask = (head[:, None] < K) & (d[None, :] < D)
    x = tl.load(new_ptr + (token * K + head[:, None]) * D + d[None, :], mask=mask)
    tl.store(pages_ptr + row[:, None] * D + d[None, :], x, mask=mask)


@triton.jit
def _code(x, scale, TOP: tl.constexpr):
    """round(x / scale), half to even (adding 1.5 * 2^23 leaves no bit for fractions), clipped, never wrapped."""
    ratio = tl.div_rn(x, tl.where(scale > 0, scale, 1.0))
    return tl.minimum(tl.maximum((ratio + 12582912.0) - 12582912.0, -TOP), TOP).to(tl.int8)


@triton.jit
def _write_int8(
    new_ptr, page_ptr, offset_ptr, _, _scales, pages_ptr, scales_ptr,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, head, row = _place(page_ptr, offset_ptr, K, PAGE, HEADS)
    d = tl.arange(0, WIDTH)
    mask = (head[:, None] < K) & (d[None, :] < D)
    x = tl.load(new_ptr + (token * K + head[:, None]) * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x), axis=1), 127.0)
    tl.store(pages_ptr + row[:, None] * D + d[None, :], _code(x, scale[:, None], 127), mask=mask)
    tl.store(scales_ptr + row, scale, mask=head < K)


@triton.jit
def _write_int4(
    new_ptr, page_ptr, offset_ptr, _, _scales, pages_ptr, scales_ptr,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, head, row = _place(page_ptr, offset_ptr, K, PAGE, HEADS)
    d = tl.arange(0, WIDTH)
    mask = (head[:, None] < K) & (d[None, :] < D // 2)
    low_ptr = new_ptr + (token * K + head[:, None]) * D + d[None, :]
    low = tl.load(low_ptr, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(low_ptr + D // 2, mask=mask, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1), 7.0)
    low = (_code(low, scale[:, None], 7) + 8).to(tl.uint8)
    high = (_code(high, scale[:, None], 7) + 8).to(tl.uint8)
    tl.store(pages_ptr + row[:, None] * (D // 2) + d[None, :], low | (high << 4), mask=mask)
    tl.store(scales_ptr + row, scale, mask=head < K)
