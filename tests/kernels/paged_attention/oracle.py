"""Dense attention in float64, one query at a time: what paged attention has to equal, whatever the pages."""

from __future__ import annotations

import numpy as np


def attend(
    q_GD: np.ndarray,
    k_TD: np.ndarray,
    v_TD: np.ndarray,
    position: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_G: np.ndarray | None = None,
) -> np.ndarray:
    """Outputs f64[G, D] of G query heads that share one KV head, at one position; keys 0 .. T-1."""
    out = np.zeros((len(q_GD), v_TD.shape[1]))
    if position < 0:
        return out
    first = 0 if window is None else max(0, position - window + 1)
    k, v = k_TD[first : position + 1].astype(np.float64), v_TD[first : position + 1].astype(np.float64)
    for g, q in enumerate(q_GD.astype(np.float64)):
        scores = scale * (k @ q)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        sink = -np.inf if sinks_G is None else float(sinks_G[g])
        peak = max(scores.max(), sink)
        weights = np.exp(scores - peak)
        out[g] = weights @ v / (weights.sum() + np.exp(sink - peak))
    return out
