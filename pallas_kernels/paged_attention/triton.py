"""Paged attention on a GPU: one kernel for decode, verify and prefill rows, and one that merges split contexts.

A program holds the query heads of one KV head for ``m`` / G neighbouring queries of one row as one [m, D] tile (tile
row i: query i // G, head i % G), so that every key is loaded once for all of them, and walks the keys that any of them
sees, ``t`` at a time, through the page table, with a running maximum and sum (FlashAttention-2, Dao 2023). Where rows
are too few to fill the device, ``splits`` programs share the keys evenly (Flash-Decoding, Dao et al. 2023): each writes
its own softmax average in f32 and its natural-log-sum-exp, and the second kernel weighs them.

Codes become exact values of q's dtype in registers; their scales, constant along a head, multiply the columns of the
scores and of the weights instead. Inside, scores are in units of log 2, so that one instruction exponentiates.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.launch import Launch, Launcher
from pallas_kernels.paged_attention.problem import V_UNIT, Problem
from pallas_kernels.target import Target
from pallas_kernels.tuning import Tile

_BITS = {"same": 0, "int8": 8, "int4": 4}
_MERGED = 64  # dimensions of a head that one program of the merge takes


def tiles(problem: Problem, target: Target) -> tuple[Tile, ...]:
    """``m``: queries times heads of a program; ``t``: keys at a time; ``splits``; ``warps``; ``stages``."""
    p = problem
    if "bits" in (p.k_format, p.v_format):
        raise NotImplementedError("pools of bit patterns exist on CPU only")
    return (
        {"m": 16, "t": 64, "splits": 1, "warps": 4, "stages": 3},
        {"m": 16, "t": 64, "splits": 4, "warps": 4, "stages": 3},
    )


def run(
    problem: Problem,
    tile: Tile,
    launcher: Launcher,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    base: jax.Array,
    positions: jax.Array,
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """See ``api.paged_attention``."""
    p, splits = problem, tile["splits"]
    if q.size == 0:
        return q
    rows = p.N * p.Q * p.K * p.G
    num_tiles = triton.cdiv(p.Q * p.G, tile["m"])
    constants = {
        "Q": p.Q,
        "K": p.K,
        "G": p.G,
        "D": p.D,
        "PAGE": p.page_size,
        "P": p.P,
        "ROWS": rows,
        "K_BITS": _BITS[p.k_format],
        "V_BITS": _BITS[p.v_format],
        "V_UNIT": V_UNIT[p.v_format],
        "SCALE": p.scale,
        "WINDOW": p.window or 0,
        "SOFTCAP": p.softcap or 0.0,
        "SINKS": p.sinks,
        "K_WIDTH": _width(p.D, p.k_format),
        "V_WIDTH": _width(p.D, p.v_format),
        "M": tile["m"],
        "T": tile["t"],
        "TILES": num_tiles,
        "SPLITS": splits,
    }
    out = jax.ShapeDtypeStruct((splits, *q.shape), q.dtype if splits == 1 else jnp.float32)
    lse = jax.ShapeDtypeStruct((splits, rows), jnp.float32)
    options = {"num_warps": tile["warps"], "num_stages": tile["stages"]}
    attend = Launch(_attend, (p.N * p.K * num_tiles, splits), (out, lse), constants, **options)
    absent = positions  # a pointer that is not followed
    optional = (absent if x is None else x for x in (k_scales, v_scales, sinks))
    parts, lse = launcher(attend, q, k_pages, v_pages, table, base, positions, *optional)
    if splits == 1:
        return parts[0]
    constants = {"ROWS": rows, "D": p.D, "SPLITS": splits, "S": triton.next_power_of_2(splits), "WIDTH": _MERGED}
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    (merged,) = launcher(Launch(_merge, (rows, triton.cdiv(p.D, _MERGED)), (out,), constants), parts, lse)
    return merged


def _width(D: int, format: str) -> int:
    """Columns of a tile of stored elements: a power of two, at least what a matrix instruction takes."""
    return max(16, triton.next_power_of_2(D // 2 if format == "int4" else D))


@triton.jit
def _load(ptr, row, here, STRIDE: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH]: the first W elements of rows STRIDE apart, then zeros; zeros where not ``here``."""
    d = tl.arange(0, WIDTH)
    mask = here[:, None]
    if WIDTH != W:
        mask = mask & (d < W)[None, :]
    return tl.load(ptr + row[:, None] * STRIDE + d[None, :], mask=mask, other=0)


@triton.jit
def _code(packed, HIGH: tl.constexpr, dtype: tl.constexpr):
    """One nibble of each byte, less 8. OR-ed into the last bits of the float of which they count ones, 128 in bfloat16
    and 1024 in float16, it needs no conversion."""
    nibble = (packed >> 4 if HIGH else packed & 15).to(tl.uint16)
    if dtype == tl.bfloat16:
        return (nibble | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
    elif dtype == tl.float16:
        return (nibble | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    else:
        return nibble.to(dtype) - 8.0


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))  # exp(2 x); infinite: 1


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, base_ptr, positions_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, out_ptr, lse_ptr,
    Q: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr, V_UNIT: tl.constexpr, SCALE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    tile = TILES - 1 - tl.program_id(0) % TILES  # the longest contexts start first
    head = tl.program_id(0) // TILES % K
    n = (tl.program_id(0) // TILES // K).to(tl.int64)
    split = tl.program_id(1)

    m = tile * M + tl.arange(0, M)
    here = m < Q * G
    position = tl.load(positions_ptr + n * Q + m // G, mask=here, other=-1)
    row = ((n * Q + m // G) * K + head) * G + m % G  # of q and of the result
    base = tl.load(base_ptr + n)

    # Keys first .. last are seen by a query of this tile, none when last is -1. Blocks of T keys, an equal share each.
    last = tl.max(position, axis=0)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tl.min(tl.where(position >= 0, position, last), axis=0) - WINDOW + 1, 0)
    stop = (last + T) // T
    share = tl.cdiv(stop - first // T, SPLITS)
    start = first // T + split * share
    stop = tl.minimum(start + share, stop)

    if K_BITS == 4:
        q = _load(q_ptr, row, here, D, D // 2, K_WIDTH)
        q_high = _load(q_ptr + D // 2, row, here, D, D // 2, K_WIDTH)
    else:
        q = _load(q_ptr, row, here, D, D, K_WIDTH)
    # Finite: a block of which a query sees nothing must not make exp(s - peak) NaN.
    peak = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head * G + m % G, mask=here, other=-1e30)
        peak = tl.where(split == 0, tl.maximum(sink * LOG2E, -1e30), peak)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.zeros((M, V_WIDTH), tl.float32)
    if V_BITS == 4:
        acc_high = tl.zeros((M, V_WIDTH), tl.float32)

    for block in range(start, stop):
        t = block * T + tl.arange(0, T)
        seen = (t >= first) & (t <= last)  # others may never have been written
        if PAGE % T == 0:
            page = tl.load(table_ptr + n * P + block * T // PAGE - base)
        else:
            page = tl.load(table_ptr + n * P + t // PAGE - base, mask=seen, other=0)
        key = (page.to(tl.int64) * K + head) * PAGE + t % PAGE  # row of the pool

        if K_BITS == 4:
            packed = _load(k_ptr, key, seen, D // 2, D // 2, K_WIDTH)
            s = tl.dot(q, tl.trans(_code(packed, False, dtype)), input_precision="ieee")
            s = tl.dot(q_high, tl.trans(_code(packed, True, dtype)), s, input_precision="ieee")
        else:
            k = _load(k_ptr, key, seen, D, D, K_WIDTH).to(dtype)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if K_BITS > 0:
            s *= tl.load(k_scales_ptr + key, mask=seen, other=0.0)[None, :]
        if SOFTCAP > 0:
            s = (SOFTCAP * LOG2E) * _tanh(s * (SCALE / SOFTCAP))
        else:
            s *= SCALE * LOG2E
        visible = t[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (t[None, :] > position[:, None] - WINDOW)
        s = tl.where(visible, s, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(s, axis=1))
        weight = tl.exp2(s - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weight, axis=1)
        peak = new_peak
        if V_BITS > 0:
            weight *= (tl.load(v_scales_ptr + key, mask=seen, other=0.0) / V_UNIT)[None, :]
        weight = weight.to(dtype)
        if V_BITS == 4:
            packed = _load(v_ptr, key, seen, D // 2, D // 2, V_WIDTH)
            acc = tl.dot(weight, _code(packed, False, dtype), acc * shrink[:, None], input_precision="ieee")
            acc_high = tl.dot(weight, _code(packed, True, dtype), acc_high * shrink[:, None], input_precision="ieee")
        else:
            v = _load(v_ptr, key, seen, D, D, V_WIDTH).to(dtype)
            acc = tl.dot(weight, v, acc * shrink[:, None], input_precision="ieee")

    lse = (peak + tl.log2(total)) * 0.6931471805599453  # nothing seen: -inf
    divisor = tl.where(total == 0, 1.0, total) / V_UNIT
    row += split.to(tl.int64) * ROWS
    tl.store(lse_ptr + row, lse, mask=here)
    if SPLITS > 1:
        here = here & (lse != float("-inf"))  # the merge reads no others
    if V_BITS == 4:
        _store(out_ptr, row, here, acc / divisor[:, None], D, D // 2, V_WIDTH)
        _store(out_ptr + D // 2, row, here, acc_high / divisor[:, None], D, D // 2, V_WIDTH)
    else:
        _store(out_ptr, row, here, acc / divisor[:, None], D, D, V_WIDTH)


@triton.jit
def _store(ptr, row, here, x, STRIDE: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)
    mask = here[:, None] & (d < W)[None, :]
    tl.store(ptr + row[:, None] * STRIDE + d[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _merge(
    parts_ptr, lse_ptr, out_ptr,
    ROWS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row's averages over shares of its keys, weighed by what each share's keys sum to."""
    row = tl.program_id(0)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    split = tl.arange(0, S)
    lse = tl.load(lse_ptr + split.to(tl.int64) * ROWS + row, mask=split < SPLITS, other=float("-inf"))
    peak = tl.maximum(tl.max(lse, axis=0), -1e30)  # finite: a row that sees nothing is zero, not NaN
    weight = tl.exp(lse - peak)
    total = tl.sum(weight, axis=0)
    mask = (lse != float("-inf"))[:, None] & (d < D)[None, :]
    part = tl.load(parts_ptr + (split.to(tl.int64) * ROWS + row)[:, None] * D + d[None, :], mask=mask, other=0.0)
    out = tl.sum(part * weight[:, None], axis=0) / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + row.to(tl.int64) * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)
