"""What decode should reach on the device, and what it did."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Target:
    """``goal``: a share; ``reached``: the worst of what was measured, None if nothing was."""

    name: str
    goal: float
    reached: float | None
    at_most: bool = False

    @property
    def state(self) -> Literal["met", "missed", "not measured"]:
        if self.reached is None:
            return "not measured"
        return "met" if (self.reached < self.goal if self.at_most else self.reached >= self.goal) else "missed"

    @property
    def goal_text(self) -> str:
        return f"{'<' if self.at_most else '>='} {self.goal:.0%}"

    @property
    def reached_text(self) -> str:
        return "-" if self.reached is None else f"{self.reached:.1%}"


def judge(ops: list[dict[str, Any]], models: list[dict[str, Any]], top: Mapping[str, float]) -> list[Target]:
    """``ops``, ``models``: figures of the parts "speed" and "models"; ``top``: ceilings. Bandwidth is of the copy."""
    copy = top.get("copy")

    def decode(weights: str, most_rows: int) -> Iterator[float]:
        for r in models:
            if copy and r["model"] == "llama-8b" and r["weights"] == weights:
                yield from (at["gb_per_s"] / copy for at in r["by_rows"] if at["rows"] <= most_rows)

    attention = [
        r["gb_per_s"] / copy
        for r in ops
        if copy and r.get("op") == "paged_attention" and r["chosen"] and r["bound"] == "bytes"
    ]
    gaps = {key: [at[key] for r in models for at in r["by_rows"]] for key in ("host_gap", "host_gap_single")}
    return [
        Target("8B bf16 decode, 1 row: bandwidth", 0.80, min(decode("bf16", 1), default=None)),
        Target("8B int8 decode, 1 row: bandwidth", 0.75, min(decode("int8", 1), default=None)),
        Target("8B int4 decode, up to 16 rows (1, 8): bandwidth", 0.65, min(decode("int4", 16), default=None)),
        Target("decode attention at 8k, all rows and formats: bandwidth", 0.75, min(attention, default=None)),
        Target("host gap, steps dispatched as served", 0.03, max(gaps["host_gap"], default=None), at_most=True),
        Target("host gap, steps dispatched singly", 0.03, max(gaps["host_gap_single"], default=None), at_most=True),
    ]
