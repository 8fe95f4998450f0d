"""How a weight is stored, as plain facts: what a manifest says of it, and what a user asks for."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from pallas_kernels.quant_matmul.problem import GROUPS, Format

STORED = "stored"  # quantised weights stay as the source has them
WEIGHTS = (STORED, "bf16", "int8", "int4", "int2", "fp8")  # what --weights takes; checkpoints may hold other formats
GROUPED = ("int4", "int2")  # those with scales of groups; int8 and fp8 have one scale for each output
DEFAULT_GROUP = 64


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One stored weight's format; which there are, and their layouts, is in pallas_kernels/quant_matmul/packing.py.
    ``group``: inputs that share a scale, 0: one scale for each output; ``scale_dtype``: of group scales and zeros;
    ``ordered``: the inputs' order is stored with the codes; ``rotated``: see rotation.py."""

    format: Format
    group: int = 0
    zeros: bool = False
    scale_dtype: str = "float32"
    ordered: bool = False
    rotated: bool = False

    def __str__(self) -> str:
        group = f"-g{self.group}" if self.group else ""
        return self.format + group + ("-zeros" if self.zeros else "") + ("-rotated" if self.rotated else "")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a user asks of a conversion. ``keep`` and ``also`` are patterns of parameter paths (``layers_0/attn/*``):
    weights left wide, and weights quantised that by default are not (embedding, output head). ``rotate``: int8
    weights are rotated.

    Raises ValueError for a combination that does not exist.
    """

    weights: str = "bf16"
    group: int = DEFAULT_GROUP
    zeros: bool = False
    keep: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    rotate: bool = False

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {self.weights!r}")
        if self.group not in GROUPS:
            raise ValueError(f"group size must be one of {', '.join(map(str, GROUPS))}, got {self.group}")
        if self.zeros and self.weights not in GROUPED:
            raise ValueError(f"zero points are for {' and '.join(GROUPED)} weights, not for {self.weights}")

        if self.rotate and self.weights != "int8":
            raise ValueError(f"a rotation is for int8 weights, not for {self.weights}")

    @property
    def scheme(self) -> Scheme | None:
        """Of every weight that is quantised; None: nothing is, or only what comes so."""
        if self.weights in (STORED, "bf16"):
            return None
        if self.weights in GROUPED:
            return Scheme(self.weights, self.group, self.zeros, "float16")
        return Scheme(self.weights, rotated=self.rotate)

    def schemes(self, paths: Iterable[str], stored: Mapping[str, Scheme] = MappingProxyType({})) -> dict[str, Scheme]:
        """The scheme of each parameter path that is quantised: every layer's matmul weights but for ``keep``, and what
        is in ``also``; for "stored" those of ``stored`` (what the source has) but for ``keep``. Raises ValueError for
        a pattern that no weight matches."""
        weights = [path for path in paths if path.endswith("/weight")]
        for pattern in (*self.keep, *self.also):
            if not fnmatch.filter(weights, pattern):
                raise ValueError(f"no weight matches {pattern!r}; they are called {weights[0]}, {weights[1]}, ...")

        def kept(path: str) -> bool:
            return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.keep)

        if self.weights == STORED:
            return {path: scheme for path, scheme in stored.items() if not kept(path)}
        if self.scheme is None:
            return {}

        def wanted(path: str) -> bool:
            if kept(path):
                return False
            return path.startswith("layers_") or any(fnmatch.fnmatchcase(path, pattern) for pattern in self.also)

        return {path: self.scheme for path in weights if wanted(path)}


def to_json(schemes: dict[str, Scheme]) -> dict[str, Any]:
    return {path: dataclasses.asdict(scheme) for path, scheme in schemes.items()}


def from_json(data: dict[str, Any]) -> dict[str, Scheme]:
    """Raises TypeError for fields that are not a scheme's."""
    return {path: Scheme(**fields) for path, fields in data.items()}
