"""Hugging Face checkpoint folder: ``config.json`` and safetensors (``safetensors_files.py``), quantised or not
(``prequantised/``). No code that comes with a checkpoint is ever imported."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxsqueeze.checkpoint import prequantised
from jaxsqueeze.checkpoint.safetensors_files import FLOATS, SafetensorsFiles, read_json
from jaxsqueeze.checkpoint.source import SourceError, cast
from jaxsqueeze.quant.qtensor import QTensor
from jaxsqueeze.quant.scheme import Scheme

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


class HFFolder:
    """A TensorSource over a folder."""

    def __init__(self, path: Path):
        self.path = path
        if not (path / "config.json").is_file():
            raise SourceError(f"{path}: no config.json here; give the folder of a Hugging Face checkpoint")
        self.hf_config = _without_auto_map(read_json(path / "config.json"))
        generation = path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}
        self._weights = SafetensorsFiles(path)
        self._quantised = prequantised.read(self.hf_config, self._weights)
        self.notes = self._quantised.notes

    def names(self) -> Iterable[str]:
        plain = (name for name in self._weights.names() if name not in self._quantised.hidden)
        return [*plain, *self._quantised.linears]

    def shape(self, name: str) -> tuple[int, ...]:
        if linear := self._quantised.linears.get(name):
            return linear.shape
        if self._weights.kind(name) not in FLOATS:
            raise SourceError(
                f"{self.where(name)}: tensor {name!r} is stored as {self._weights.kind(name)}, which is not a plain "
                f"weight type ({', '.join(FLOATS)}); use the unquantised checkpoint"
            )
        return self._weights.shape(name)

    def where(self, name: str) -> Path:
        linear = self._quantised.linears.get(name)
        return linear.file if linear else self._weights.where(name)

    def get(self, name: str, dtype: np.dtype) -> np.ndarray:
        if name not in self._quantised.linears:
            return cast(self._weights.read(name), dtype)
        linear = self._quantised.linears[name]
        return linear.read().expand(dtype)

    def scheme(self, name: str) -> Scheme | None:
        linear = self._quantised.linears.get(name)
        return linear.scheme if linear else None

    def quantised(self, name: str) -> QTensor:
        linear = self._quantised.linears[name]
        try:
            return linear.read().pack(linear.scheme)
        except SourceError:
            raise
        except ValueError as error:
            raise SourceError(
                f"{linear.file}: tensor {name!r} cannot be kept as it is, {error}; choose --weights bf16 or int4"
            ) from error

    def form(self, name: str) -> str:
        return f"{self._quantised.method} {self.scheme(name)}"

    def tokenizer_files(self) -> dict[str, bytes]:
        return {n: (self.path / n).read_bytes() for n in TOKENIZER_FILES if (self.path / n).is_file()}

    def files(self) -> list[Path]:
        small = [self.path / n for n in ("config.json", *TOKENIZER_FILES)]
        return sorted([*self._weights.files(), *(p for p in small if p.is_file())])


def _without_auto_map(config: dict[str, Any]) -> dict[str, Any]:
    """``auto_map`` names code that comes with a checkpoint: dropped unread."""
    return {key: value for key, value in config.items() if key != "auto_map"}
