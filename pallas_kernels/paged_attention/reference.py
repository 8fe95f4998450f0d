"""Paged attention in plain JAX: ragged queries over page tables, one pass over the keys.

Keys are visited in blocks of pages with a running maximum and sum (online softmax, Milakov & Gimelshein 2018; used so
by FlashAttention, Dao et al. 2022). The number of blocks is a run-time value, so one compiled program serves every
context length and reads only the pages that the longest row of this batch has. Codes become values of q's dtype block
by block; their scales are constant along a head, so they multiply scores and weights, not keys and values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.problem import V_UNIT, Problem

_MASKED = -1e30  # finite: a fully masked block must not turn exp(s - max) into NaN


def block_pages(rows: int, page_size: int, table_pages: int) -> int:
    """Pages visited at once. Many rows: short blocks, so that short contexts pay little padding; few rows: long
    blocks, so that the loop's own cost stays small against the matmuls inside (measured on XLA:CPU)."""
    tokens = max(64, min(512, 1024 // max(rows, 1)))
    return max(1, min(tokens // page_size, table_pages))


def run(
    problem: Problem,
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
    N, Q, K, G, D, page_size = (getattr(problem, size) for size in ("N", "Q", "K", "G", "D", "page_size"))
    if q.size == 0:
        return q
    pages = block_pages(N, page_size, problem.P)
    pad = -problem.P % pages
    table = jnp.pad(table, ((0, 0), (0, pad)))
    block = pages * page_size
    last_page = jnp.max(positions, axis=1) // page_size - base  # masked rows: -1 // page_size <= -1, no block
    num_blocks = jnp.maximum(jnp.max(last_page) // pages + 1, 0)
    q_NKMD = q.transpose(0, 2, 1, 3, 4).reshape(N, K, Q * G, D)
    pos_NM = jnp.repeat(positions, G, axis=1)

    def gather(pool: jax.Array, ids: jax.Array) -> jax.Array:
        x = jnp.take(pool, ids, axis=0, mode="clip")  # [N, pages, K, page_size, D]
        return _as_float(x, q.dtype).transpose(0, 2, 1, 3, 4).reshape(N, K, block, D)

    def gather_scales(scales: jax.Array, ids: jax.Array) -> jax.Array:
        x = jnp.take(scales, ids, axis=0, mode="clip")  # [N, pages, K, page_size]
        return x.transpose(0, 2, 1, 3).reshape(N, K, 1, block)

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        peak, total, acc = carry
        ids = lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        k, v = gather(k_pages, ids), gather(v_pages, ids)
        s = jnp.einsum("nkmd,nktd->nkmt", q_NKMD, k, preferred_element_type=jnp.float32) * problem.scale
        if k_scales is not None:
            s = s * gather_scales(k_scales, ids)
        if problem.softcap is not None:
            s = problem.softcap * jnp.tanh(s / problem.softcap)
        t = (base[:, None] * page_size + i * block + jnp.arange(block))[:, None, None, :]  # absolute key positions
        p_ = pos_NM[:, None, :, None]
        visible = t <= p_
        if problem.window is not None:
            visible &= t > p_ - problem.window
        s = jnp.where(visible, s, _MASKED)
        new_peak = jnp.maximum(peak, s.max(-1))
        p = jnp.where(visible, jnp.exp(s - new_peak[..., None]), 0.0)
        shrink = jnp.exp(peak - new_peak)
        total = total * shrink + p.sum(-1)
        if v_scales is not None:
            p = jnp.where(visible, p * (gather_scales(v_scales, ids) / V_UNIT[problem.v_format]), 0.0)
        pv = jnp.einsum("nkmt,nktd->nkmd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_peak, total, acc * shrink[..., None] + pv

    shape = (N, K, Q * G)
    acc = jnp.zeros((*shape, D), jnp.float32)
    if sinks is None:
        init = jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), acc
    else:  # a key seen before all others, of no value
        init = jnp.broadcast_to(jnp.tile(sinks, (1, Q)), shape), jnp.ones(shape, jnp.float32), acc
    _, total, acc = lax.fori_loop(0, num_blocks, body, init)
    out = acc / jnp.where(total > 0, total, 1.0)[..., None]  # nothing visible: exact zeros
    if v_scales is not None:
        out = out * V_UNIT[problem.v_format]
    return out.reshape(N, K, Q, G, D).transpose(0, 2, 1, 3, 4).astype(q.dtype)


def _as_float(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Stored elements [..., W] as values or codes [..., D] of ``dtype``: exact, codes are small (see ``kv_write``)."""
    if x.dtype == dtype:
        return x
    if x.dtype == jnp.uint8:
        x = jnp.concatenate([x & 15, x >> 4], axis=-1).astype(jnp.int8) - 8
    return x.astype(dtype) if x.dtype == jnp.int8 else lax.bitcast_convert_type(x, dtype)
