"""Decode attention for Hopper, in Pallas Mosaic GPU: split-KV, one warpgroup for each row, KV head and split.

Keys are the M side of the tensor core's tile (64 rows), since decode has few queries: the M = Q * G queries that share
a KV head, padded to a multiple of 8, are its N side.

    s_TM = k_TD @ q_MD.T      p_TM = exp2(s_TM - max_T)      o_DM += v_TD.T @ p_TM

A block of ``keys`` tokens is whole pages: one asynchronous copy a page for K and for V each, ``stages`` blocks ahead,
one barrier each. A block that reaches past the last visible page reads that page again; masks come from positions, and
V is zero where it may hold what nobody wrote. Scores are in units of log 2 inside. Each split gives normalised outputs
and a natural-log-sum-exp; plain JAX merges them (and the sinks, one more score).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.launch import Launcher
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.target import Target
from pallas_kernels.tuning import Tile
from pallas_kernels.warpgroup import COMPILER_PARAMS, Transposed, Warpgroup, swizzled

_MASKED = -1e30  # finite: a fully masked block must not turn exp(s - max) into NaN
_QUERIES = 64  # that share a KV head: more belong on the M side, which is prefill
_TILE = 64 * 64  # keys times queries of a block: more would spill registers
_LOG2E = math.log2(math.e)


def tiles(problem: Problem, target: Target) -> tuple[Tile, ...]:
    """``keys`` of a block, ``stages`` of blocks in flight, ``splits`` of the keys."""
    p = problem
    if target.capability != 90:
        raise NotImplementedError("written for compute capability 9.0 (wgmma)")
    if (p.k_format, p.v_format) != ("same", "same") or p.dtype not in ("bfloat16", "float16"):
        raise NotImplementedError("multiplies bfloat16 or float16 pages as they are")
    if not 0 < p.Q * p.G <= _QUERIES:
        raise NotImplementedError(f"1 to {_QUERIES} queries share a KV head, not {p.Q} x {p.G}")
    if p.D not in (64, 128, 256):
        raise NotImplementedError("heads of 64, 128 or 256 values")
    if p.page_size not in (8, 16, 32, 64, 128):
        raise NotImplementedError("pages of 8, 16, 32, 64 or 128 tokens")
    if p.N == 0 or p.P == 0:
        raise NotImplementedError("no rows or no pages")
    sizes = [(keys, stages) for keys in (64, 128) for stages in (4, 3, 2) if keys % p.page_size == 0]
    shared = {size: _shared_bytes(p, *size) for size in sizes if size[0] * _columns(p) <= _TILE}
    fitting = [size for size in shared if shared[size] <= target.shared_bytes]
    if not fitting:
        raise NotImplementedError(f"two blocks of pages of {p.page_size} tokens for {p.Q} x {p.G} queries do not fit")
    fitting.sort(key=lambda size: 2 * shared[size] > target.shared_bytes)  # first what fits twice
    return tuple({"keys": keys, "stages": stages, "splits": _splits(p, keys, target)} for keys, stages in fitting)


def _splits(p: Problem, keys: int, target: Target) -> int:
    """Enough programs for two on each core, of at least four blocks each where the table is full."""
    blocks = pl.cdiv(p.P * p.page_size, keys)
    return max(1, min(2 * target.cores // (p.N * p.K), blocks // 4, 64))


def _columns(p: Problem) -> int:
    return pl.cdiv(p.Q * p.G, 8) * 8


def _shared_bytes(p: Problem, keys: int, stages: int) -> int:
    columns = _columns(p)
    kept = 2 * columns * (p.D + keys) + 4 * columns * (p.D + 2)
    return 2 * stages * keys * p.D * 2 + kept + 4096  # what reductions across warps and barriers take


def run(
    problem: Problem,
    tile: Tile,
    launcher: Launcher | None,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    base: jax.Array,
    positions: jax.Array,
    k_scales: None,
    v_scales: None,
    sinks: jax.Array | None,
    *,
    interpret: Any = None,
) -> jax.Array:
    """See ``api.paged_attention``. ``interpret``: parameters of Mosaic GPU's simulator, None on a GPU."""
    del launcher, k_scales, v_scales
    p = problem
    M = p.Q * p.G
    columns = ((0, 0), (0, _columns(p) - M))
    q_NKMD = jnp.pad(q.transpose(0, 2, 1, 3, 4).reshape(p.N, p.K, M, p.D), ((0, 0), *columns, (0, 0)))
    position_NM = jnp.pad(jnp.repeat(positions, p.G, axis=1), columns, constant_values=-1)
    out, lse = _attend(problem, tile, interpret)(
        q_NKMD, position_NM, _span(p, base, positions), table, k_pages, v_pages
    )
    out = _merge(out, lse, sinks if sinks is None else jnp.pad(jnp.tile(sinks, (1, p.Q)), columns))[:, :, :M]
    return out.reshape(p.N, p.K, p.Q, p.G, p.D).transpose(0, 2, 1, 3, 4).astype(q.dtype)


def _span(p: Problem, base: jax.Array, positions: jax.Array) -> jax.Array:
    """i32[N, 4]: a row's first visible page, as a column of the table, the number of visible pages, the position of
    the first one's first token, and that of the last visible token."""
    last = jnp.max(positions, axis=1)
    first = jnp.zeros_like(base)
    if p.window is not None:
        oldest = jnp.min(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions), axis=1) - p.window + 1
        first = jnp.maximum(oldest // p.page_size - base, 0)
    pages = jnp.maximum(last // p.page_size - base - first + 1, 0)
    return jnp.stack([first, pages, (base + first) * p.page_size, last], axis=1)


def _merge(out: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """f32[N, K, M, D] of f32[N, K, splits, M, D], f32[N, K, splits, M] and f32[K, M]."""
    peak = jnp.max(lse, axis=2)
    if sinks is not None:
        peak = jnp.maximum(peak, sinks)
    weight = jnp.exp(lse - peak[:, :, None])  # where nothing is visible: 1, of outputs that are exact zeros
    total = jnp.sum(weight, axis=2)
    if sinks is not None:
        total += jnp.exp(sinks - peak)
    return jnp.sum(out * (weight / total[:, :, None])[..., None], axis=2)


def _attend(problem: Problem, tile: Tile, interpret: Any) -> Any:
    p, M = problem, _columns(problem)
    keys, stages, splits = tile["keys"], tile["stages"], tile["splits"]
    block_pages = keys // p.page_size
    warpgroup = Warpgroup(interpret)

    def kernel(q, positions, span, table, k_pages, v_pages, out, lse, q_s, position_s, k_s, v_s, p_s, out_s, lse_s,
               ready, loaded):  # fmt: skip
        n, k, split = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("split")
        first, pages, origin, last = (span[n, i] for i in range(4))
        blocks = lax.div(pages + (block_pages - 1), block_pages)
        share = lax.div(blocks + (splits - 1), splits)
        start = split * share
        count = jnp.clip(blocks - start, 0, share)

        def fetch(i: jax.Array) -> None:
            """Block ``i`` of this split."""
            slot = lax.rem(i, stages)
            columns = [(start + i) * block_pages + j for j in range(block_pages)]
            ids = [table[n, first + jnp.minimum(column, pages - 1)] for column in columns]
            for j, page in enumerate(ids):
                rows = pl.ds(j * p.page_size, p.page_size)
                plgpu.copy_gmem_to_smem(k_pages.at[page, k], k_s.at[slot, rows], loaded.at[slot])
                plgpu.copy_gmem_to_smem(v_pages.at[page, k], v_s.at[slot, rows], loaded.at[slot])

        plgpu.copy_gmem_to_smem(q.at[n, k], q_s, ready)
        plgpu.copy_gmem_to_smem(positions.at[n], position_s, ready)
        for i in range(stages - 1):
            pl.when(i < count)(lambda i=i: fetch(jnp.int32(i)))
        plgpu.barrier_wait(ready)
        position_TM = lax.broadcast_in_dim(position_s[...], (keys, M), (1,))

        def clear(slot: jax.Array, seen: jax.Array) -> None:
            """Zeroes V after the first ``seen`` tokens of a block."""
            for column in range(0, p.D, 64):  # a few registers at a time
                part = v_s.at[slot, :, pl.ds(column, 64)]
                row = lax.broadcasted_iota(jnp.int32, part.shape, 0)
                part[...] = jnp.where(row < seen, part[...], 0)

        def block(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
            peak_M, total_TM, acc_DM = carry
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(loaded.at[slot])
            s = warpgroup.dot((k_s.at[slot], Transposed(q_s))) * (p.scale * _LOG2E)
            if p.softcap is not None:  # cap * tanh(s / cap)
                cap = p.softcap * _LOG2E
                s = cap - 2 * cap / (jnp.exp2(s * (2 * _LOG2E / cap)) + 1)
            begin = origin + (start + i) * keys
            t = lax.broadcasted_iota(jnp.int32, (keys, M), 0) + begin
            visible = t <= position_TM
            if p.window is not None:
                visible &= t > position_TM - p.window
            s = jnp.where(visible, s, _MASKED)  # also what K holds where nobody wrote
            new_peak_M = jnp.maximum(peak_M, jnp.max(s, axis=0))
            weight = jnp.where(visible, jnp.exp2(s - lax.broadcast_in_dim(new_peak_M, s.shape, (1,))), 0.0)
            shrink_M = jnp.exp2(peak_M - new_peak_M)
            total_TM = total_TM * lax.broadcast_in_dim(shrink_M, s.shape, (1,)) + weight
            warpgroup.store_transposed(p_s, weight.astype(p.dtype))
            pl.when(begin + keys > last + 1)(lambda: clear(slot, last + 1 - begin))
            plgpu.commit_smem()  # and all warps are done with the block before this one
            pl.when(i + (stages - 1) < count)(lambda: fetch(i + (stages - 1)))
            acc_DM = acc_DM * lax.broadcast_in_dim(shrink_M, acc_DM.shape, (1,))
            acc_DM = warpgroup.dot((Transposed(v_s.at[slot]), Transposed(p_s)), acc=acc_DM)
            return new_peak_M, total_TM, acc_DM

        def constant(shape: tuple[int, ...], value: float) -> jax.Array:
            layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(0)
            return warpgroup.laid_out(jnp.full(shape, value, jnp.float32), layout)

        init = constant((M,), _MASKED), constant((keys, M), 0.0), constant((p.D, M), 0.0)
        peak_M, total_TM, acc_DM = lax.fori_loop(0, count, block, init)
        total_M = jnp.sum(total_TM, axis=0)
        total_M = jnp.where(total_M > 0, total_M, 1.0)  # nothing visible: exact zeros
        warpgroup.store_transposed(out_s, acc_DM / lax.broadcast_in_dim(total_M, acc_DM.shape, (1,)))
        lse_s[...] = (peak_M + jnp.log2(total_M)) / _LOG2E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, out.at[n, k, split])
        plgpu.copy_smem_to_gmem(lse_s, lse.at[n, k, split])
        plgpu.wait_smem_to_gmem(0)

    dtype = jnp.dtype(p.dtype)
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((p.N, p.K, splits, M, p.D), jnp.float32),
            jax.ShapeDtypeStruct((p.N, p.K, splits, M), jnp.float32),
        ),
        grid=(p.N, p.K, splits),
        grid_names=("row", "head", "split"),
        scratch_types=(
            plgpu.SMEM((M, p.D), dtype, transforms=swizzled(p.D, dtype)),
            plgpu.SMEM((M,), jnp.int32),
            plgpu.SMEM((stages, keys, p.D), dtype, transforms=swizzled(p.D, dtype)),
            plgpu.SMEM((stages, keys, p.D), dtype, transforms=swizzled(p.D, dtype)),
            plgpu.SMEM((M, keys), dtype, transforms=swizzled(keys, dtype)),
            plgpu.SMEM((M, p.D), jnp.float32, transforms=swizzled(p.D, jnp.float32)),
            plgpu.SMEM((M,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2 * block_pages, num_barriers=stages),
        ),
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
    )
