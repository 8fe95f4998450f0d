"""Top-k, top-p and min-p filters of whole vocabularies, without a sort."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float32, Int32

from pallas_kernels import dispatch
from pallas_kernels.sample_topk.problem import Problem
from pallas_kernels.target import Target


def sample_topk(
    x: Float32[Array, "B V"],
    top_k: Int32[Array, " B"],
    top_p: Float32[Array, " B"],
    min_p: Float32[Array, " B"],
    *,
    target: Target,
) -> jax.Array:
    """``x`` with -inf outside top_k, then outside the smallest set of the rest with renormalised mass >= top_p (nucleus
    sampling, Holtzman et al. 2020), then under ``min_p`` times the best (Nguyen et al. 2024).

    ``x``: log-probabilities up to a constant per row. Equal words share their fate: those equal to the last one kept
    stay too. The best word always stays. Off, per row: top_k >= V, top_p >= 1, min_p <= 0; a row without a filter
    stays as it is and costs next to nothing. Each value of a row with a NaN or +inf either stays or becomes -inf.
    Raises ValueError for arrays that do not fit.
    """
    problem = Problem(*x.shape)
    given = x, top_k, top_p, min_p
    if any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in zip(given, problem.inputs(), strict=True)):
        raise ValueError(f"need f32[B, V], i32[B], f32[B], f32[B], got {[jax.typeof(a) for a in given]}")
    return dispatch.run("sample_topk", problem, target, *given)
