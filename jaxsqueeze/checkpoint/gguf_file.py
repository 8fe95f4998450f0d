"""GGUF container: metadata and tensor places, read straight from a memory map.

The ``gguf`` package supplies the enums, the block sizes and the dequantisers. Its own reader builds a numpy object per
array element: 22 s for a vocabulary of 262144 words, where the loop below takes well under one second, so the header
is parsed here. Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little
endian). Tensor shapes are given row-major (the file stores them innermost first).
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from jaxsqueeze.checkpoint.source import SourceError, cast

_Q = gguf.GGMLQuantizationType
SUPPORTED = (
    _Q.F32,
    _Q.F16,
    _Q.BF16,
    _Q.Q8_0,
    _Q.Q4_0,
    _Q.Q4_1,
    _Q.Q5_0,
    _Q.Q5_1,
    _Q.Q2_K,
    _Q.Q3_K,
    _Q.Q4_K,
    _Q.Q5_K,
    _Q.Q6_K,
)
_PLAIN = {_Q.F32: np.dtype("<f4"), _Q.F16: np.dtype("<f2"), _Q.BF16: np.dtype(ml_dtypes.bfloat16)}
_V = gguf.GGUFValueType
_SCALARS = {
    _V.UINT8: np.dtype("<u1"),
    _V.INT8: np.dtype("<i1"),
    _V.UINT16: np.dtype("<u2"),
    _V.INT16: np.dtype("<i2"),
    _V.UINT32: np.dtype("<u4"),
    _V.INT32: np.dtype("<i4"),
    _V.FLOAT32: np.dtype("<f4"),
    _V.BOOL: np.dtype("?"),
    _V.UINT64: np.dtype("<u8"),
    _V.INT64: np.dtype("<i8"),
    _V.FLOAT64: np.dtype("<f8"),
}
_U64 = struct.Struct("<Q")
_DEQUANT_BYTES = 1 << 22  # quantised bytes expanded at once: bounds the float32 temporaries


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """Place and type of one tensor; ``shape`` is row-major."""

    file: Path
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    nbytes: int


class GGUFFile:
    """One GGUF file: ``metadata`` (arrays of numbers as numpy, of strings as lists) and ``tensors`` by name."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # empty
            raise SourceError(f"{path}: empty file; download it again") from error
        self._at = 0
        try:
            self._read()
        except (struct.error, IndexError, OverflowError, UnicodeDecodeError, ValueError) as error:
            if isinstance(error, SourceError):
                raise
            raise SourceError(f"{path}: truncated or damaged GGUF header ({error}); download it again") from error

    def _read(self) -> None:
        if self._map[:4] != b"GGUF":
            raise SourceError(f"{self.path}: not a GGUF file (bad magic); give a .gguf file")
        self._at = 4
        version = self._number("<I")
        if version not in (2, 3):
            raise SourceError(f"{self.path}: GGUF version {version} is not supported; convert it again with llama.cpp")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string()
            self.metadata[key] = self._value(_V(self._number("<I")))
        infos = []
        for _ in range(num_tensors):
            name = self._string()
            dims = [self._number("<Q") for _ in range(self._number("<I"))]
            infos.append((name, tuple(reversed(dims)), self._number("<I"), self._number("<Q")))
        alignment = int(self.metadata.get("general.alignment", 32))
        if alignment < 1:
            raise SourceError(f"{self.path}: alignment {alignment} is damaged; download this file again")
        data_start = -(-self._at // alignment) * alignment
        self.tensors = {name: self._place(name, shape, kind, data_start + at) for name, shape, kind, at in infos}

    def _place(self, name: str, shape: tuple[int, ...], kind_value: int, start: int) -> GGUFTensor:
        try:
            kind = _Q(kind_value)
        except ValueError:
            kind = None
        if kind not in SUPPORTED:
            label = kind.name if kind is not None else kind_value
            raise SourceError(
                f"{self.path}: tensor {name!r} has type {label}, which is not supported "
                f"({', '.join(k.name for k in SUPPORTED)}); use a file with one of these"
            )
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise SourceError(
                f"{self.path}: tensor {name!r} of shape {shape} cannot hold {kind.name} blocks of {block}"
            )
        nbytes = int(np.prod(shape, dtype=object)) // block * block_bytes
        if start + nbytes > len(self._map):
            raise SourceError(
                f"{self.path}: truncated, tensor {name!r} ends at byte {start + nbytes} of {len(self._map)}; "
                "download this file again"
            )
        return GGUFTensor(self.path, kind, shape, start, nbytes)

    def read(self, tensor: GGUFTensor, dtype: np.dtype) -> np.ndarray:
        """Dequantised values in ``dtype``; a read-only view of the file if they are stored so."""
        if tensor.nbytes == 0:
            return np.zeros(tensor.shape, dtype)
        if tensor.kind in _PLAIN:
            own = _PLAIN[tensor.kind]
            flat = np.frombuffer(self._map, own, tensor.nbytes // own.itemsize, tensor.start)
            return cast(flat.reshape(tensor.shape), dtype)
        # Whole rows at a time: the dequantisers loop in Python over small groups of rows.
        raw = self.blocks(tensor)
        out = np.empty(tensor.shape, dtype)
        rows = out.reshape(-1, tensor.shape[-1])
        step = max(1, _DEQUANT_BYTES // raw.shape[1])
        for first in range(0, len(raw), step):
            rows[first : first + step] = gguf.dequantize(raw[first : first + step], tensor.kind)
        return out

    def blocks(self, tensor: GGUFTensor) -> np.ndarray:
        """u8[rows, bytes of a row]: a quantised tensor as it is stored, a read-only view of the file."""
        block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
        raw = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.start)
        return raw.reshape(-1, tensor.shape[-1] // block * block_bytes)

    def _number(self, fmt: str) -> int:
        (value,) = struct.unpack_from(fmt, self._map, self._at)
        self._at += struct.calcsize(fmt)
        return value

    def _string(self) -> str:
        start = self._at + 8
        end = start + _U64.unpack_from(self._map, self._at)[0]
        if end > len(self._map):
            raise IndexError("a string runs past the end of the file")
        self._at = end
        # Some writers stored tokens that are not valid UTF-8; they can only be byte pieces, never matched as text.
        return self._map[start:end].decode("utf-8", errors="replace")

    def _value(self, kind: gguf.GGUFValueType) -> Any:
        if kind == _V.STRING:
            return self._string()
        if kind == _V.ARRAY:
            item, count = _V(self._number("<I")), self._number("<Q")
            if item in _SCALARS:
                return self._numbers(_SCALARS[item], count)
            if count > len(self._map):
                raise IndexError("an array is longer than the file")
            return [self._value(item) for _ in range(count)]
        value = self._numbers(_SCALARS[kind], 1)[0]
        # The decimal the writer meant, 1e-05 and not 9.99999974e-06: the same float32.
        return float(str(value)) if kind == _V.FLOAT32 else value.item()

    def _numbers(self, dtype: np.dtype, count: int) -> np.ndarray:
        values = np.frombuffer(self._map, dtype, count, self._at)
        self._at += count * dtype.itemsize
        return values
