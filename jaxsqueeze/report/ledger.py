"""The memory ledger printed at start: where device memory goes, and what the KV pool holds."""

from __future__ import annotations

import dataclasses

from rich.table import Table


@dataclasses.dataclass(frozen=True)
class GroupLedger:
    """One cache group's pool."""

    name: str
    layers: int
    pages: int  # that can be handed out
    tokens: int  # they hold
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Ledger:
    weight_bytes: int
    groups: tuple[GroupLedger, ...]
    step_bytes: int | None  # the largest step's buffers; None before compiling
    max_model_len: int
    full_requests: int  # requests of max_model_len that fit at once

    @property
    def kv_bytes(self) -> int:
        return sum(g.num_bytes for g in self.groups)

    def table(self) -> Table:
        """A rich table of bytes and what they are for."""
        table = Table("memory", "MiB", "holds", title="Memory ledger", title_justify="left")
        table.columns[1].justify = "right"
        table.add_row("weights", _mib(self.weight_bytes), "")
        for g in self.groups:
            holds = f"{g.pages} pages, {g.tokens} tokens ({g.layers} layers)"
            table.add_row(f"KV pool, {g.name}", _mib(g.num_bytes), holds)
        if self.step_bytes is not None:
            table.add_row("step buffers", _mib(self.step_bytes), "largest compiled step")
        table.add_row("", "", f"{self.full_requests} requests of {self.max_model_len} tokens at once")
        return table

    def __rich__(self) -> Table:
        return self.table()


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"
