"""Attention of ragged queries over a paged KV pool: one op for prefill chunks, decode rows and verify rows."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels import arguments, dispatch
from pallas_kernels.kv_write.problem import format_of
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.target import Target


def paged_attention(
    q: Float[Array, "N Q K G D"],
    k_pages: Num[Array, "pages K page_size W"],
    v_pages: Num[Array, "pages K page_size W"],
    table: Int32[Array, "N P"],
    base: Int32[Array, " N"],
    positions: Int32[Array, "N Q"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scales: Float32[Array, "pages K page_size"] | None = None,
    v_scales: Float32[Array, "pages K page_size"] | None = None,
    sinks: Float32[Array, "K G"] | None = None,
    target: Target,
) -> Float[Array, "N Q K G D"]:
    """Causal softmax attention, grouped-query.

    N rows of Q queries each, K KV heads, G query heads per KV head. Key position ``t`` of row n lies in page
    ``table[n, t // page_size - base[n]]``; a query at position p sees keys ``max(0, p - window + 1) .. p``, all of
    them already written; elsewhere V must be finite, while K and scales may hold anything. A masked query has
    position -1 and yields exact zeros. Scores: ``scale * q.k``, then ``softcap * tanh(s / softcap)`` if given; f32
    inside. ``sinks`` are one more score per query head, after scale and soft-cap, that takes its share of the softmax
    and gives nothing.

    K and V each come as ``kv_write`` writes them: of q's dtype, its bits, int8 codes or packed int4 codes, the codes
    with scales. Raises ValueError for what does not fit.
    """
    N, Q, K, G, D = q.shape
    problem = Problem(
        N, Q, K, G, D, k_pages.shape[2], table.shape[1], q.dtype.name, format_of(k_pages.dtype, q.dtype),
        format_of(v_pages.dtype, q.dtype), scale, window, softcap, sinks is not None,
    )  # fmt: skip
    arrays = {
        "q": q, "k_pages": k_pages, "v_pages": v_pages, "table": table, "base": base, "positions": positions,
        "k_scales": k_scales, "v_scales": v_scales, "sinks": sinks,
    }  # fmt: skip
    about = f"q {q.dtype.name}{list(q.shape)}, pages of {k_pages.dtype.name} and {v_pages.dtype.name}"
    arguments.check(about, arrays, problem.inputs(k_pages.shape[0]))
    if window is not None and window < 1:
        raise ValueError(f"window must be >= 1, got {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be > 0, got {softcap}")
    return dispatch.run("paged_attention", problem, target, *arrays.values())
