"""What the scheduler holds right now, for metrics and the ledger. Per-group tuples are in the order of the groups."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SchedulerStats:
    running: int  # requests that have been admitted and are not finished
    waiting: int
    preemptions: int  # since the start
    pages_total: tuple[int, ...]  # that can be handed out: page 0 is not among them
    pages_used: tuple[int, ...]
    live_tokens: tuple[int, ...]  # tokens whose KV the held pages keep
    tail_tokens: tuple[int, ...]  # token places of held pages after their sequence's last token

    @property
    def page_tail_waste(self) -> float:
        """Unused token places at the ends of sequences / live tokens, over all groups; 0 when nothing is held."""
        live = sum(self.live_tokens)
        return sum(self.tail_tokens) / live if live else 0.0
