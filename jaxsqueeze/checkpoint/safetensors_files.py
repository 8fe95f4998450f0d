"""The safetensors files of a Hugging Face folder, one or shards with an index: tensors as they are stored.

Tensors are views of memory-mapped files, so nothing is read before it is used. The ``safetensors`` package validates
each header; it cannot hand out numpy views of bfloat16, so the offsets are read from the header beside it. Pickled
weights are refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxsqueeze.checkpoint.source import SourceError
from jaxsqueeze.models.families import canonical_name

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
FLOATS = ("F32", "F16", "BF16", "F64")  # plain weights
_NP_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


class SafetensorsFiles:
    """All tensors of a folder by canonical name."""

    def __init__(self, path: Path):
        self.path = path
        self._files = self._weight_files()
        self._tensors: dict[str, _Stored] = {}
        for file, expected in self._files.items():
            stored = _read_header(file)
            names = stored if expected is None else expected
            for name in names:
                if name not in stored:
                    raise SourceError(
                        f"{file}: the index {_INDEX} says it holds tensor {name!r}, but it does not; "
                        "download index and shards again"
                    )
                self._tensors[canonical_name(name)] = stored[name]

    def names(self) -> Iterable[str]:
        return self._tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def kind(self, name: str) -> str:
        """The stored type, as safetensors spells it."""
        return self._tensors[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def where(self, name: str) -> Path:
        return self._tensors[name].file

    def require(self, name: str, kinds: Iterable[str], *shapes: tuple[int, ...]) -> None:
        """SourceError if the tensor is not there in one of ``kinds`` and one of ``shapes`` (none given: any)."""
        if name not in self:
            raise SourceError(
                f"{self.path}: tensor {name!r} is missing from the weights; download the complete checkpoint"
            )
        if self.kind(name) not in kinds:
            raise SourceError(
                f"{self.where(name)}: tensor {name!r} is stored as {self.kind(name)}, not as {' or '.join(kinds)}; "
                "use config and weights of the same model"
            )
        if shapes and self.shape(name) not in shapes:
            raise SourceError(
                f"{self.where(name)}: tensor {name!r} has shape {list(self.shape(name))}, but the quantisation "
                f"asks for {' or '.join(str(list(s)) for s in shapes)}; use config and weights of the same model"
            )

    def read(self, name: str) -> np.ndarray:
        """The tensor in its own type: a read-only view of the file."""
        stored = self._tensors[name]
        own = _NP_DTYPES[stored.dtype]
        count = int(np.prod(stored.shape, dtype=np.int64))
        if count == 0:
            return np.zeros(stored.shape, own)
        mapped = np.memmap(stored.file, np.uint8, "r", stored.start, (count * own.itemsize,))
        flat = mapped.view(np.ndarray).view(own)
        if not flat.flags.aligned:  # the format allows it, some readers of arrays do not
            flat = flat.copy()
        return flat.reshape(stored.shape)

    def files(self) -> list[Path]:
        return list(self._files)

    def _weight_files(self) -> dict[Path, list[str] | None]:
        """Each weight file to the tensors the index expects in it (None: whatever it holds)."""
        index = self.path / _INDEX
        if index.is_file():
            by_file: dict[Path, list[str]] = {}
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise SourceError(f"{index}: has no weight_map; download it again")
            for name, file_name in weight_map.items():
                if not isinstance(file_name, str) or Path(file_name).name != file_name:
                    raise SourceError(f"{index}: names {file_name!r}, which is not a file of this folder")
                by_file.setdefault(self.path / file_name, []).append(name)
            for file in by_file:
                if not file.is_file():
                    raise SourceError(f"{file}: missing, but the index {_INDEX} needs it; download this shard")
            return dict(by_file)
        if (self.path / _SINGLE).is_file():
            return {self.path / _SINGLE: None}
        others = sorted(self.path.glob("*.safetensors"))
        if len(others) == 1:
            return {others[0]: None}
        if others:
            raise SourceError(
                f"{index}: missing, and there are {len(others)} safetensors files; download the index beside them"
            )
        pickles = sorted(p.name for pattern in _PICKLES for p in self.path.glob(pattern))
        if pickles:
            raise SourceError(
                f"{self.path / pickles[0]}: pickled weights can run code and are never loaded; "
                "use a safetensors version of this checkpoint"
            )
        raise SourceError(f"{self.path}: no safetensors weights here; download {_SINGLE} or its shards and index")


@dataclasses.dataclass(frozen=True, slots=True)
class _Stored:
    """Where one tensor's bytes are."""

    file: Path
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file


def _read_header(file: Path) -> dict[str, _Stored]:
    try:
        with safe_open(file, framework="np"):
            pass  # opening checks header, offsets and file length
        with file.open("rb") as f:
            header_len = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(header_len))
    except (SafetensorError, ValueError) as error:
        raise SourceError(f"{file}: truncated or damaged ({error}); download this file again") from error
    return {
        name: _Stored(file, entry["dtype"], tuple(entry["shape"]), 8 + header_len + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or a SourceError that names the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not valid JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise SourceError(f"{path}: not a JSON object; download it again")
    return data
