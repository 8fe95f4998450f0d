"""Attention of ragged queries over a paged KV pool: one op for prefill chunks and decode rows."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention import reference


def paged_attention(
    q: Float[Array, "N Q K G D"],
    k_pages: Num[Array, "pages K page_size D"],
    v_pages: Num[Array, "pages K page_size D"],
    table: Int[Array, "N P"],
    base: Int[Array, " N"],
    positions: Int[Array, "N Q"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "N Q K G D"]:
    """Causal softmax attention, grouped-query.

    N rows of Q queries each, K KV heads, G query heads per KV head. Key position ``t`` of row n lies in page
    ``table[n, t // page_size - base[n]]``; a query at position p sees keys ``max(0, p - window + 1) .. p``, all of
    them already written; elsewhere V must be finite, K may hold anything. A masked query has position -1 and yields
    exact zeros. Pages of unsigned integers hold the bit patterns of q's dtype. Scores:
    ``scale * q.k``, then ``softcap * tanh(s / softcap)`` if given; f32 inside.
    """
    if q.shape[2] != k_pages.shape[1] or q.shape[4] != k_pages.shape[3]:
        raise ValueError(f"q {q.shape} does not fit pages {k_pages.shape}: KV heads and head_dim must agree")
    if window is not None and window < 1:
        raise ValueError(f"window must be >= 1, got {window}")
    with jax.named_scope("paged_attention"):
        return reference.paged_attention(
            q, k_pages, v_pages, table, base, positions, scale=scale, window=window, softcap=softcap
        )
