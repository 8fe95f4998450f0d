"""Tiles measured on a device: ``tuned/<device kind>.json``, written by ``scripts/tune.py``.

    {"<op>": {"<problem key>": {"implementation": "triton", "tile": {...}, "us": 21.3, "reference_us": 30.1}}}

``us`` are medians in microseconds. Where XLA's own code was the fastest, ``implementation`` is "reference". A table
that cannot be read is reported once, and is then as if there were none.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path

from pallas_kernels.target import Target

log = logging.getLogger(__name__)

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
    return _table(path(target.kind)).get(op, {}).get(key)


@functools.cache
def _table(file: Path) -> dict[str, dict[str, Tuned]]:
    if not file.is_file():
        return {}
    try:
        ops = json.loads(file.read_text())
        return {op: {key: _entry(**entry) for key, entry in entries.items()} for op, entries in ops.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("default tiles serve: cannot read %s (%s); delete it and run scripts/tune.py anew", file, error)
        return {}


def _entry(implementation: str, tile: Tile, us: float, reference_us: float) -> Tuned:
    return Tuned(str(implementation), dict(tile), float(us), float(reference_us))
