"""A GGUF file, or a set of split ones, as a TensorSource: Hugging Face names, layouts and settings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxsqueeze.checkpoint import gguf_codes, gguf_names, gguf_tokenizer
from jaxsqueeze.checkpoint.gguf_config import hf_config
from jaxsqueeze.checkpoint.gguf_file import GGUFFile, GGUFTensor
from jaxsqueeze.checkpoint.source import SourceError, cast
from jaxsqueeze.quant.qtensor import QTensor
from jaxsqueeze.quant.scheme import Scheme

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GGUFSource:
    """A TensorSource over one model's GGUF files."""

    notes = ()

    def __init__(self, path: Path):
        self.path = path
        self._parts = [GGUFFile(p) for p in _split_paths(path)]
        self._metadata = self._parts[0].metadata
        self._architecture = self._metadata.get("general.architecture")
        stored = {name: (part, tensor) for part in self._parts for name, tensor in part.tensors.items()}
        tables = {n: self._float(*stored[n]) for n in gguf_names.ROPE_TABLES if n in stored}
        embedding = stored.get("token_embd.weight")
        if embedding is None:
            raise SourceError(f"{path}: tensor 'token_embd.weight' is missing; use a GGUF file of a whole model")
        self.hf_config = hf_config(
            path,
            self._metadata,
            tables,
            vocab_size=embedding[1].shape[0],
            tied="output.weight" not in stored,
        )
        self._tensors = {
            gguf_names.hf_name(self._architecture, name): place
            for name, place in stored.items()
            if name not in gguf_names.ROPE_TABLES
        }
        # Biases are not announced in the metadata: they are there or not.
        if self._architecture in ("llama", "smollm3"):
            first = "model.layers.0."
            self.hf_config["attention_bias"] = f"{first}self_attn.q_proj.bias" in self._tensors
            self.hf_config["mlp_bias"] = f"{first}mlp.down_proj.bias" in self._tensors

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        return {"eos_token_id": gguf_tokenizer.end_ids(self._metadata)}

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][1].shape

    def where(self, name: str) -> Path:
        return self._tensors[name][1].file

    def get(self, name: str, dtype: np.dtype) -> np.ndarray:
        part, tensor = self._tensors[name]
        if self._architecture in gguf_names.NORMS_PLUS_ONE and name.endswith("norm.weight"):
            return cast(self._float(part, tensor) - np.float32(1.0), dtype)
        return self._undo_interleave(name, part.read(tensor, dtype))

    def scheme(self, name: str) -> Scheme | None:
        _, tensor = self._tensors[name]
        return gguf_codes.scheme(tensor.kind, tensor.shape)

    def quantised(self, name: str) -> QTensor:
        part, tensor = self._tensors[name]
        codes = gguf_codes.codes(part.blocks(tensor), tensor.kind)
        return codes.rows(lambda rows: self._undo_interleave(name, rows)).pack(self.scheme(name))

    def form(self, name: str) -> str:
        return self._tensors[name][1].kind.name

    def _undo_interleave(self, name: str, rows: np.ndarray) -> np.ndarray:
        if self._architecture in gguf_names.ROW_PERMUTED:
            heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
            if heads:
                return gguf_names.undo_interleave(rows, self.hf_config[heads])
        return rows

    def tokenizer_files(self) -> dict[str, bytes]:
        return gguf_tokenizer.tokenizer_files(self.path, self._metadata)

    def files(self) -> list[Path]:
        return [part.path for part in self._parts]

    @staticmethod
    def _float(part: GGUFFile, tensor: GGUFTensor) -> np.ndarray:
        return part.read(tensor, np.dtype(np.float32))


def _split_paths(path: Path) -> list[Path]:
    """All files of a split model, whichever of them was named."""
    match = _SPLIT.fullmatch(path.name)
    if not match:
        return [path]
    stem, _, count = match.groups()
    paths = [path.with_name(f"{stem}-{i:05d}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    for part in paths:
        if not part.is_file():
            raise SourceError(f"{part}: missing, but {path.name} is one of {int(count)} parts; download this part")
    return paths
