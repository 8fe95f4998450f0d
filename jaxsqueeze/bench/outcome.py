"""What became of one request to a server. Times are seconds from the start of the run."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a call. ``chunk_times``: arrivals of the chunks that carried text. Token counts are the
    server's usage, else 0 for the prompt and one per chunk for the output. ``error``: None for a complete answer."""

    begin: float  # latencies count from here: due time (open loop) or sending (closed loop)
    sent: float
    end: float
    chunk_times: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    has_usage: bool = False
    error: str | None = None
