"""Dense attention in float64, one query at a time: what paged attention has to equal, whatever the pages."""

from __future__ import annotations

import numpy as np


def attend(
    q_ND: np.ndarray,
    k_TD: np.ndarray,
    v_TD: np.ndarray,
    position: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    """Outputs f64[N, D] of N query heads that share one KV head, at one position; keys 0 .. T-1."""
    out = np.zeros((len(q_ND), v_TD.shape[1]))
    if position < 0:
        return out
    first = 0 if window is None else max(0, position - window + 1)
    k, v = k_TD[first : position + 1].astype(np.float64), v_TD[first : position + 1].astype(np.float64)
    for n, q in enumerate(q_ND.astype(np.float64)):
        scores = scale * (k @ q)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[n] = weights @ v / weights.sum()
    return out
