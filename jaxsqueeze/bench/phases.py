"""Prefill and decode speed from when each row's tokens came out, the same way for every measured program.

Prefill lasts from the start until every row has its first token. Decode is counted where all rows are decoding: from
then until the first row ends. Before, some rows decode beside the others' prefill; after, the batch thins out.
Units: seconds, tokens per second.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Emission:
    """``tokens`` new tokens of ``row`` became known at ``time``, seconds from the start; ``last``: the row ended."""

    time: float
    row: int
    tokens: int
    last: bool = False


def phases(emissions: Iterable[Emission], rows: int, prompt_tokens: int) -> dict[str, float | None]:
    """Speeds of one batch of ``rows`` prompts of ``prompt_tokens`` each. ``decode_tokens_per_s`` is None where no
    moment had all rows decoding (outputs too short)."""
    first: dict[int, float] = {}
    emissions = [e for e in emissions if e.tokens or e.last]
    for e in emissions:
        if e.tokens:
            first.setdefault(e.row, e.time)
    if len(first) != rows:
        raise RuntimeError(f"{rows - len(first)} of {rows} rows gave no token")
    begin = max(first.values())
    end = min(e.time for e in emissions if e.last)
    decoded = sum(e.tokens for e in emissions if begin < e.time <= end)
    total = max(e.time for e in emissions)
    return {
        "prefill_tokens_per_s": rows * prompt_tokens / begin,
        "decode_tokens_per_s": decoded / (end - begin) if end > begin else None,
        "output_tokens_per_s": sum(e.tokens for e in emissions) / total,
    }


def medians(repeats: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Median of every figure over repeats; None where a repeat has none."""
    figures: dict[str, float | None] = {}
    for name in repeats[0]:
        values = [r[name] for r in repeats]
        figures[name] = None if None in values else statistics.median(values)
    return figures
