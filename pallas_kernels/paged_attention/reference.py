"""Paged attention in plain JAX: ragged queries over page tables, one pass over the keys.

Keys are visited in blocks of pages with a running maximum and sum (online softmax, Milakov & Gimelshein 2018; used so
by FlashAttention, Dao et al. 2022). The number of blocks is a run-time value, so one compiled program serves every
context length and reads only the pages that the longest row of this batch has.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_MASKED = -1e30  # finite: a fully masked block must not turn exp(s - max) into NaN


def block_pages(rows: int, page_size: int, table_pages: int) -> int:
    """Pages visited at once. Many rows: short blocks, so that short contexts pay little padding; few rows: long
    blocks, so that the loop's own cost stays small against the matmuls inside (measured on XLA:CPU)."""
    tokens = max(64, min(512, 1024 // rows))
    return max(1, min(tokens // page_size, table_pages))


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    base: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """See ``api.paged_attention``."""
    N, Q, K, G, D = q.shape
    page_size = k_pages.shape[2]
    pages = block_pages(N, page_size, table.shape[1])
    pad = -table.shape[1] % pages
    table = jnp.pad(table, ((0, 0), (0, pad)))
    block = pages * page_size
    last_page = jnp.max(positions, axis=1) // page_size - base  # masked rows: -1 // page_size <= -1, no block
    num_blocks = jnp.maximum(jnp.max(last_page) // pages + 1, 0)
    q_NKMD = q.transpose(0, 2, 1, 3, 4).reshape(N, K, Q * G, D)
    pos_NM = jnp.repeat(positions, G, axis=1)

    def gather(pool: jax.Array, ids: jax.Array) -> jax.Array:
        x = jnp.take(pool, ids, axis=0, mode="clip")  # [N, pages, K, page_size, D]
        return _as_float(x, q.dtype).transpose(0, 2, 1, 3, 4).reshape(N, K, block, D)

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        peak, total, acc = carry
        ids = lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        k, v = gather(k_pages, ids), gather(v_pages, ids)
        s = jnp.einsum("nkmd,nktd->nkmt", q_NKMD, k, preferred_element_type=jnp.float32) * scale
        if softcap is not None:
            s = softcap * jnp.tanh(s / softcap)
        t = (base[:, None] * page_size + i * block + jnp.arange(block))[:, None, None, :]  # absolute key positions
        p_ = pos_NM[:, None, :, None]
        visible = t <= p_
        if window is not None:
            visible &= t > p_ - window
        s = jnp.where(visible, s, _MASKED)
        new_peak = jnp.maximum(peak, s.max(-1))
        p = jnp.where(visible, jnp.exp(s - new_peak[..., None]), 0.0)
        shrink = jnp.exp(peak - new_peak)
        total = total * shrink + p.sum(-1)
        pv = jnp.einsum("nkmt,nktd->nkmd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_peak, total, acc * shrink[..., None] + pv

    shape = (N, K, Q * G)
    init = (jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, D), jnp.float32))
    _, total, acc = lax.fori_loop(0, num_blocks, body, init)
    out = acc / jnp.where(total > 0, total, 1.0)[..., None]  # nothing visible: exact zeros
    return out.reshape(N, K, Q, G, D).transpose(0, 2, 1, 3, 4).astype(q.dtype)


def _as_float(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Integer pools hold bit patterns (see ``kv_write``)."""
    return lax.bitcast_convert_type(x, dtype) if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else x
