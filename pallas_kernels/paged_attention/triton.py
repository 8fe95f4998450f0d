"""Paged attention on a GPU: one kernel for decode, verify and prefill rows, and one that merges split contexts.

A program holds the query heads of one KV head for ``m`` / G neighbouring queries of one row as one [m, D] tile (tile
row i: query i // G, head i % G), so that every key is loaded once for all of them, and walks the keys that any of them
sees, ``t`` at a time, through the page table, with a running maximum and sum (FlashAttention-2, Dao 2023). Where rows
are too few to fill the device, ``splits`` programs share the keys evenly (Flash-Decoding, Dao et al. 2023): each writes
its own softmax average in f32 and its natural-log-sum-exp, and the second kernel weighs them.

Codes become exact values of q's dtype in registers, 16 bits of them at a time: there is an instruction that reads
transposed 16-bit elements from shared memory, and none for bytes. So a key is several interleaved parts, each with a
matrix product of its own. Their scales, constant along a head, multiply the columns of the scores and of the weights
instead. Inside, scores are in units of log 2, so that one instruction exponentiates.
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
_PARTS = {"same": 1, "int8": 2, "int4": 4}  # codes that are read at once
_MERGED = 64  # dimensions of a head that one program of the merge takes


def tiles(problem: Problem, target: Target) -> tuple[Tile, ...]:
    """``m``: queries times heads a program; ``t``: keys at once; ``splits`` of a context; ``warps``; ``stages``."""
    p = problem
    if "bits" in (p.k_format, p.v_format):
        raise NotImplementedError("pools of bit patterns exist on CPU only")
    if p.D % max(_PARTS[p.k_format], _PARTS[p.v_format]):
        raise NotImplementedError(f"codes are read 16 bits at a time: they do not hold whole heads of {p.D}")
    m, t, warps = _tile(p, target.capability)
    splits = _splits(p, m, target)
    found = [{"m": m, "t": t, "splits": splits, "warps": warps, "stages": 3}]
    changes = [{"t": 2 * t}, {"t": t // 2}, {"warps": 2 * warps}, {"warps": warps // 2}, {"stages": 2}, {"stages": 4}]
    changes += [{"splits": 2 * splits}, {"splits": splits // 2}] if splits > 1 else []
    if m >= 64:
        changes.append({"m": m // 2, "splits": _splits(p, m // 2, target), "warps": max(4, warps // 2)})
    for change in changes:
        tile = {**found[0], **change}
        keys = (tile["stages"] - 1) * tile["t"] * (_row_bytes(p, p.k_format) + _row_bytes(p, p.v_format))
        if tile["t"] >= 16 and keys + 4 * tile["m"] * p.D <= target.shared_bytes:
            found.append(tile)
    return tuple(found)


def _tile(problem: Problem, capability: int) -> tuple[int, int, int]:
    """m, t and warps that spill no register: before Hopper, matrix instructions take both operands from registers;
    those of f32 are no matrix instructions."""
    p, early = problem, capability < 90
    m = max(16, triton.next_power_of_2(p.Q * p.G))
    if p.dtype == "float32":
        return min(m, 32), 16, 8
    if p.D > 128:
        m = min(m, 32 if early else 64)
    if m <= 32:
        return m, min(max(16384 // max(_row_bytes(p, p.k_format), _row_bytes(p, p.v_format)), 32), 128), 4
    if p.D > 128:
        return m, 32, 8
    codes = (p.k_format, p.v_format) != ("same", "same")
    return min(m, 128), 32 if early and codes else 64, 4 if m == 64 else 8


def _row_bytes(problem: Problem, format: str) -> int:
    """Of one key or value, as a tile holds it."""
    return _width(problem.D, format) * (2 if format in ("int8", "int4") else jnp.dtype(problem.dtype).itemsize)


def _splits(problem: Problem, m: int, target: Target) -> int:
    """Enough programs for every core to hold a few small ones or a large one, if each has keys enough: what a program
    writes and the merge reads, m rows of f32, shall be little beside the keys."""
    p = problem
    programs = max(1, p.N * p.K * triton.cdiv(p.Q * p.G, m))
    keys = p.P * p.page_size if p.window is None else min(p.P * p.page_size, p.window + p.Q)
    return max(1, min(target.cores * max(1, 64 // m) // programs, keys // (16 * m), 128))


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
    return max(16, triton.next_power_of_2(D // _PARTS[format]))


@triton.jit
def _load(ptr, row, here, STRIDE: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH]: W elements STEP apart of rows STRIDE apart, then zeros; zeros where not ``here``."""
    d = tl.arange(0, WIDTH)
    mask = here[:, None]
    if WIDTH != W:
        mask = mask & (d < W)[None, :]
    return tl.load(ptr + row[:, None] * STRIDE + (d * STEP)[None, :], mask=mask, other=0)


@triton.jit
def _pages(table_ptr, t, first, last, PAGE: tl.constexpr, T: tl.constexpr):
    """The page of each key t .. t + T, or the only one; page 0 for keys that are not first .. last."""
    if PAGE % T == 0:
        return tl.load(table_ptr + t // PAGE, mask=t <= last, other=0)
    else:
        t += tl.arange(0, T)
        return tl.load(table_ptr + t // PAGE, mask=(t >= first) & (t <= last), other=0)


@triton.jit
def _part(x, INDEX: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Code INDEX of each 16 bits. Instead of converting, it ORs bits of the code into the last bits of a float of
    which they count ones, 128 in bfloat16 and 1024 in float16, and subtracts what is too much: exact."""
    if BITS == 0:
        return x
    elif BITS == 8:
        x = x >> (8 * INDEX)
        if dtype == tl.bfloat16:  # seven bits of the code fit, the eighth chooses whether 128 or 256 is too much
            much = (x & 0x80) | 0x4300
            return ((x & 0x7F) | 0x4300).to(tl.bfloat16, bitcast=True) - much.to(tl.bfloat16, bitcast=True)
        elif dtype == tl.float16:
            return ((x & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
        else:
            return x.to(tl.int8).to(dtype)
    else:
        x = (x >> (4 * INDEX)) & 15
        if dtype == tl.bfloat16:
            return (x | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
        elif dtype == tl.float16:
            return (x | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        else:
            return x.to(dtype) - 8.0


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

    # 16 bits hold codes of dimensions 2 d, 2 d + 1 (8 bits), or 2 d, D / 2 + 2 d, 2 d + 1, D / 2 + 2 d + 1 (4 bits).
    if K_BITS == 0:
        K_ROW: tl.constexpr = D
        q0 = _load(q_ptr, row, here, D, 1, D, K_WIDTH)
    elif K_BITS == 8:
        K_ROW: tl.constexpr = D // 2
        q0 = _load(q_ptr, row, here, D, 2, K_ROW, K_WIDTH)
        q1 = _load(q_ptr + 1, row, here, D, 2, K_ROW, K_WIDTH)
        k_ptr = k_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    else:
        K_ROW: tl.constexpr = D // 4
        q0 = _load(q_ptr, row, here, D, 2, K_ROW, K_WIDTH)
        q1 = _load(q_ptr + D // 2, row, here, D, 2, K_ROW, K_WIDTH)
        q2 = _load(q_ptr + 1, row, here, D, 2, K_ROW, K_WIDTH)
        q3 = _load(q_ptr + D // 2 + 1, row, here, D, 2, K_ROW, K_WIDTH)
        k_ptr = k_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    V_PARTS: tl.constexpr = 1 if V_BITS == 0 else 16 // V_BITS
    V_ROW: tl.constexpr = D // V_PARTS
    if V_PARTS > 1:
        v_ptr = v_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    # Finite: a block of which a query sees nothing must not make exp(s - peak) NaN.
    peak = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head * G + m % G, mask=here, other=-1e30)
        peak = tl.where(split == 0, tl.maximum(sink * LOG2E, -1e30), peak)
        total = tl.where(split == 0, 1.0, total)
    acc0 = tl.zeros((M, V_WIDTH), tl.float32)
    if V_PARTS > 1:
        acc1 = tl.zeros((M, V_WIDTH), tl.float32)
    if V_PARTS > 2:
        acc2 = tl.zeros((M, V_WIDTH), tl.float32)
        acc3 = tl.zeros((M, V_WIDTH), tl.float32)

    # Pages are looked up one block ahead: their keys can then be fetched without waiting for the table.
    table_ptr += n * P - base
    page = _pages(table_ptr, start * T, first, last, PAGE, T)
    for block in range(start, stop):
        t = block * T + tl.arange(0, T)
        seen = (t >= first) & (t <= last)  # others may never have been written
        key = (page.to(tl.int64) * K + head) * PAGE + t % PAGE  # row of the pool
        page = _pages(table_ptr, block * T + T, first, last, PAGE, T)

        k = _load(k_ptr, key, seen, K_ROW, 1, K_ROW, K_WIDTH)
        s = tl.dot(q0, tl.trans(_part(k, 0, K_BITS, dtype)), input_precision="ieee")
        if K_BITS > 0:
            s = tl.dot(q1, tl.trans(_part(k, 1, K_BITS, dtype)), s, input_precision="ieee")
        if K_BITS == 4:
            s = tl.dot(q2, tl.trans(_part(k, 2, K_BITS, dtype)), s, input_precision="ieee")
            s = tl.dot(q3, tl.trans(_part(k, 3, K_BITS, dtype)), s, input_precision="ieee")
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
        v = _load(v_ptr, key, seen, V_ROW, 1, V_ROW, V_WIDTH)
        acc0 = tl.dot(weight, _part(v, 0, V_BITS, dtype), acc0 * shrink[:, None], input_precision="ieee")
        if V_PARTS > 1:
            acc1 = tl.dot(weight, _part(v, 1, V_BITS, dtype), acc1 * shrink[:, None], input_precision="ieee")
        if V_PARTS > 2:
            acc2 = tl.dot(weight, _part(v, 2, V_BITS, dtype), acc2 * shrink[:, None], input_precision="ieee")
            acc3 = tl.dot(weight, _part(v, 3, V_BITS, dtype), acc3 * shrink[:, None], input_precision="ieee")

    seen_none = total == 0
    total = tl.where(seen_none, 1.0, total)
    lse = tl.where(seen_none, float("-inf"), (peak + tl.log2(total)) * 0.6931471805599453)
    divisor = (total / V_UNIT)[:, None]
    row += split.to(tl.int64) * ROWS
    tl.store(lse_ptr + row, lse, mask=here)
    if SPLITS > 1:
        here = here & (lse != float("-inf"))  # the merge reads no others
    if V_PARTS == 1:
        _store(out_ptr, row, here, acc0 / divisor, D, D, V_WIDTH)
    elif V_PARTS == 2:
        _store(out_ptr, row, here, tl.interleave(acc0, acc1) / divisor, D, D, 2 * V_WIDTH)
    else:
        _store(out_ptr, row, here, tl.interleave(acc0, acc2) / divisor, D, D // 2, 2 * V_WIDTH)
        _store(out_ptr + D // 2, row, here, tl.interleave(acc1, acc3) / divisor, D, D // 2, 2 * V_WIDTH)


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
