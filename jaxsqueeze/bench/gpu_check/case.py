"""What one check is, and what it needs to know."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pallas_kernels.target import Target

Figures = dict[str, Any]  # goes to the JSON report


@dataclasses.dataclass(frozen=True)
class Case:
    """``prepare`` compiles: in a thread, beside others; ``run`` takes what it made, alone on the device.

    Either may raise NotImplementedError, with the reason, for what an implementation does not cover.
    """

    name: str
    prepare: Callable[[], Any]
    run: Callable[[Any], Figures]


@dataclasses.dataclass(frozen=True)
class Setting:
    """``quick``: tiny sizes, as on a CPU; ``out``: folder for files besides the report."""

    target: Target
    quick: bool
    out: Path
