"""What the readers of this package give: linear layers whose weights a checkpoint stores as codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxsqueeze.checkpoint.source import SourceError
from jaxsqueeze.quant.codes import Codes
from jaxsqueeze.quant.scheme import Scheme

SCALES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F8_E8M0": "bfloat16"}  # stored type to ours
_NEEDED = object()


@dataclasses.dataclass(frozen=True)
class Linear:
    """``scheme``: how we can keep the codes; None: only expanded. ``read`` gives them, or raises SourceError."""

    shape: tuple[int, int]  # [out, in]
    scheme: Scheme | None
    file: Path
    read: Callable[[], Codes]


@dataclasses.dataclass(frozen=True)
class Prequantised:
    """``linears`` by the name that the weight has in an unquantised checkpoint; ``hidden``: the tensors they are made
    of, and others that only serve quantisation; ``notes``: sentences for the user."""

    method: str
    linears: Mapping[str, Linear]
    hidden: frozenset[str]
    notes: tuple[str, ...] = ()


def setting(config: Mapping[str, Any], key: str, kind: type | tuple[type, ...], default: Any = _NEEDED) -> Any:
    """A value of the quantisation config. SourceError if it is missing or of a wrong kind."""
    value = config.get(key)
    if value is None and default is not _NEEDED:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise SourceError(f"its quantisation config has {key} = {value!r}, which is not known; download it again")
    return value


def modules(names: frozenset[str], suffix: str) -> list[str]:
    """The modules that have a tensor called ``suffix``."""
    return sorted(name.removesuffix(f".{suffix}") for name in names if name.endswith(f".{suffix}"))


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """u8[rows, n * 32 / bits] of i32[rows, n]: the codes of a word one after another from its lowest bits."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (data[..., None] >> shifts & np.uint8(2**bits - 1)).reshape(len(data), -1)


def signed(codes: np.ndarray) -> np.ndarray:
    """i8 codes that are 128 less than u8 ones."""
    return (codes ^ np.uint8(128)).view(np.int8)
