"""Tiles measured on a device: ``tuned/<device kind>.json``, written by ``scripts/tune.py``.

    {"<op>": {"<problem key>": {"implementation": "triton", "tile": {...}, "us": 21.3, "reference_us": 30.1}}}

``us`` are medians in microseconds. Where XLA's own code was the fastest, ``implementation`` is "reference".
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pallas_kernels.target import Target

Tile = Mapping[str, int]

FOLDER = Path(__file__).parent / "tuned"


@dataclasses.dataclass(frozen=True)
class Tuned:
    implementation: str
    tile: Tile
    us: float
    reference_us: float

    @property
    def why(self) -> str:
        return f"measured {self.us:.1f} us, XLA {self.reference_us:.1f} us"


def path(kind: str) -> Path:
    """The table of a device kind."""
    return FOLDER / (kind.replace(" ", "_").replace("/", "_") + ".json")


def lookup(op: str, key: str, target: Target) -> Tuned | None:
    """What was measured for this problem on this kind of device."""
    entry = _table(path(target.kind)).get(op, {}).get(key)
    return entry and Tuned(**entry)


@functools.cache
def _table(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}
