"""What the converter reads: a ``TensorSource``, the same for Hugging Face folders and GGUF files.

Whatever the file format, names and settings are Hugging Face's, so a model family is written once. Tensors are read
one at a time and memory-mapped where the file allows it: private memory never depends on the model's size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import ml_dtypes
import numpy as np

from jaxsqueeze.quant.qtensor import QTensor
from jaxsqueeze.quant.scheme import Scheme

DTypeName = Literal["bfloat16", "float32"]
DTYPES: dict[str, np.dtype] = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}

# Progress of one stage: (what is happening, done, in all); bytes, parameter units or programs, as the stage counts.
Report = Callable[[str, int, int], None]

_CAST_ELEMENTS = 1 << 22  # elements cast at once: bounds the temporaries of a cast


class SourceError(ValueError):
    """A checkpoint that cannot be used. The message is one sentence that names the file and the cure."""


class TensorSource(Protocol):
    """One checkpoint, read lazily. Every method raises SourceError for what is wrong with the files."""

    path: Path  # the file or folder, for messages
    hf_config: Mapping[str, Any]  # config.json vocabulary
    generation_config: Mapping[str, Any]  # generation_config.json vocabulary
    notes: Sequence[str]  # what of the checkpoint is not used, a sentence each

    def names(self) -> Iterable[str]:
        """Names of all tensors, Hugging Face spelling."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it. SourceError if its stored type cannot be read."""

    def get(self, name: str, dtype: np.dtype) -> np.ndarray:
        """The tensor's values in ``dtype``; a read-only view of the file where it is stored so, expanded where it is
        quantised."""

    def scheme(self, name: str) -> Scheme | None:
        """How ``quantised`` gives the tensor, without reading it; None: not quantised, or it can only be expanded."""

    def quantised(self, name: str) -> QTensor:
        """The tensor with the codes that are stored, in numpy arrays."""

    def form(self, name: str) -> str:
        """How a tensor with a scheme is stored, in the words of its file's world: "gptq int4-g128", "Q4_1"."""

    def where(self, name: str) -> Path:
        """The file that holds the tensor."""

    def tokenizer_files(self) -> dict[str, bytes]:
        """File name to content; the names are Hugging Face's (``tokenizer.json``, ``tokenizer_config.json``, ...)."""

    def files(self) -> list[Path]:
        """Every file that decides the conversion's result."""


def quiet(_stage: str, _done: int, _total: int) -> None:
    """A Report that says nothing."""


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """``array`` in ``dtype`` (round to nearest even), itself if it already is; temporaries are of bounded size."""
    if array.dtype == dtype:
        return array
    out = np.empty(array.shape, dtype)
    # A contiguous array's flat view shares its memory; 16-bit to 16-bit casts go through float32.
    source, target = array.reshape(-1), out.reshape(-1)
    for start in range(0, source.size, _CAST_ELEMENTS):
        part = source[start : start + _CAST_ELEMENTS]
        target[start : start + _CAST_ELEMENTS] = part.astype(np.float32)
    return out


def content_hash(paths: Iterable[Path], report: Report = quiet) -> str:
    """SHA-256 over names and contents, in the order given. One file alone: the file's own SHA-256."""
    paths = list(paths)
    total = sum(p.stat().st_size for p in paths)
    done = 0
    digests: list[tuple[str, str]] = []
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
                done += len(block)
                report("hashing", done, total)
        digests.append((path.name, digest.hexdigest()))
    if len(digests) == 1:
        return digests[0][1]
    return hashlib.sha256("\n".join(f"{d}  {n}" for n, d in digests).encode()).hexdigest()


def identity(paths: Iterable[Path]) -> str:
    """A quick key for "these same files, untouched": their names, sizes and modification times."""
    facts = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
