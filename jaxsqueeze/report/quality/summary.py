"""What the scores say, as a plain dict: of all positions, by rarity of the token, and by tokens of context before it.

The KL's tail and the flips of rare tokens are what averages hide. A *flip* is another most likely token where the
reference was sure (p > 0.9); among rare tokens it is the figure that goes with invented names, numbers and dates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxsqueeze.report.quality.corpus import BUCKETS, RARE

SURE = 0.9
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


def summarise(
    scores: Mapping[str, np.ndarray],
    targets: np.ndarray,
    context: np.ndarray,
    rarity: np.ndarray,
    bounds: Sequence[int],
) -> dict[str, Any]:
    """``scores``: see scoring.py, n of each; ``targets`` i32[n]: the tokens that follow; ``context`` i32[n]: tokens
    before them; ``rarity`` i32[V]: bucket of each word; ``bounds``: ends of the context buckets, rising."""
    bucket = rarity[targets]
    rare = np.isin(bucket, [BUCKETS.index(name) for name in RARE])
    starts = [0, *bounds[:-1]]
    return {
        "all": figures(scores, np.ones(len(targets), bool)),
        "rare": figures(scores, rare),
        "by_rarity": {name: figures(scores, bucket == i) for i, name in enumerate(BUCKETS)},
        "by_context": {
            f"{low} to {high}": figures(scores, (context >= low) & (context < high))
            for low, high in zip(starts, bounds, strict=True)
        },
    }


def figures(scores: Mapping[str, np.ndarray], where: np.ndarray) -> dict[str, Any]:
    """Of the positions ``where``; only their number if there are none. ``flips`` is a share of the sure ones."""
    s = {name: x[where] for name, x in scores.items()}
    n = int(where.sum())
    if not n:
        return {"positions": 0}
    same, sure = s["top"] == s["ref_top"], s["ref_sure"] > SURE
    return {
        "positions": n,
        "ref_perplexity": float(np.exp(s["ref_nll"].mean(dtype=np.float64))),
        "perplexity": float(np.exp(s["nll"].mean(dtype=np.float64))),
        "kl_mean": float(s["kl"].mean(dtype=np.float64)),
        **{f"kl_{name}": float(np.quantile(s["kl"], q)) for name, q in QUANTILES.items()},
        "kl_max": float(s["kl"].max()),
        "agreement": float(same.mean()),
        "sure": int(sure.sum()),
        "flips": float((~same[sure]).mean()) if sure.any() else None,
    }
