"""``manifest.json``: what a converted folder holds and where it came from."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

from jaxsqueeze.checkpoint.source import DTYPES, DTypeName, SourceError
from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.quant import scheme
from jaxsqueeze.quant.scheme import Scheme

FORMAT_VERSION = 3
MANIFEST = "manifest.json"
_VERSIONED = ("jaxsqueeze", "jax", "orbax-checkpoint", "numpy", "gguf", "safetensors", "tokenizers")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """``files``: every other file of the folder (path from the folder) to its size in bytes."""

    config: ModelConfig
    dtype: DTypeName  # of all weights that are not quantised; norm scales are float32
    schemes: dict[str, Scheme]  # of those that are, by parameter path
    quantisation: str  # the same in a few words, "none", "int4-g64, calibrated" or "gptq int4-g128"
    source: str  # what was converted, as its user named it
    source_hash: str  # SHA-256 (see ``source.content_hash``)
    units: tuple[str, ...]  # one Orbax checkpoint each, under params/
    files: dict[str, int]
    versions: dict[str, str]
    notes: tuple[str, ...] = ()  # what of the source was not used or not kept, a sentence each
    quality: dict[str, Any] | None = None  # what it costs against the unquantised model: report/quality/summary.py
    format_version: int = FORMAT_VERSION

    @property
    def weights(self) -> str:
        """What the weights are stored in, in a few words."""
        return self.dtype if self.quantisation == "none" else self.quantisation

    def to_bytes(self) -> bytes:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields |= {"config": self.config.to_json(), "schemes": scheme.to_json(self.schemes)}
        return json.dumps(fields, indent=1).encode()


def current_versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in _VERSIONED}}


def is_converted(folder: Path) -> bool:
    """Whether ``folder`` claims to be a converted checkpoint."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a converted folder, checked against the files that are there. SourceError names what is wrong."""
    path = folder / MANIFEST
    if not path.is_file():
        raise SourceError(f"{folder}: not a converted checkpoint (no {MANIFEST}); run `jaxsqueeze convert` first")
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        version = data["format_version"]
        if version == FORMAT_VERSION:
            config = ModelConfig.from_json(data["config"])
            given = {"config": config, "schemes": scheme.from_json(data["schemes"]), "units": tuple(data["units"])}
            given["notes"] = tuple(data.get("notes", ()))
            manifest = Manifest(**{**data, **given})
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path}: damaged ({error!r}); delete the folder and convert again") from error
    if version != FORMAT_VERSION:
        raise SourceError(
            f"{path}: format {version}, this program reads {FORMAT_VERSION}; delete the folder and convert again"
        )
    if manifest.dtype not in DTYPES:
        raise SourceError(f"{path}: {manifest.dtype} is not known here; delete the folder and convert again")
    for name, size in manifest.files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            state = "missing" if not file.is_file() else f"{file.stat().st_size} bytes instead of {size}"
            raise SourceError(f"{file}: {state}; delete the folder and convert again")
    return manifest
