"""SOURCE, as a user writes it: ``demo``, a folder, a ``.gguf`` file, or a hub id ``org/name[@revision]``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from jaxsqueeze.checkpoint import demo, hub
from jaxsqueeze.checkpoint.gguf_source import GGUFSource
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.manifest import is_converted
from jaxsqueeze.checkpoint.source import Report, SourceError, TensorSource, identity, quiet

DEMO = "demo"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A SOURCE that exists. ``name``: default name of the converted folder."""

    name: str
    open: Callable[[], TensorSource]
    known_identity: str | None = None  # when it is known without opening

    def identity(self) -> str:
        """A key that changes when the checkpoint does."""
        return self.known_identity or identity(self.open().files())


def resolve(source: str, report: Report = quiet) -> Resolved:
    """Finds (and for hub ids fetches) a checkpoint. SourceError for what cannot be one."""
    if source == DEMO:
        return Resolved(demo.NAME, lambda: GGUFSource(demo.fetch(report)), demo.SHA256)
    path = Path(source).expanduser()
    if source and path.is_dir():
        if is_converted(path):
            raise SourceError(f"{path}: converted already; serve it as it is")
        return Resolved(path.resolve().name, lambda: HFFolder(path))
    if path.is_file():
        return _file(path)
    if path.suffix == ".gguf" or path.suffix in _PICKLES or path.is_absolute() or source.startswith((".", "~")):
        raise SourceError(f"{path}: no such file or folder; check the path")
    if match := hub.HUB_ID.fullmatch(source):
        repo, revision = match["repo"], match["revision"]
        return Resolved(repo.split("/")[1], lambda: HFFolder(hub.fetch(repo, revision)))
    raise SourceError(
        f"{source}: no such file or folder; give a checkpoint folder, a .gguf file, a hub id (org/name) or 'demo'"
    )


def _file(path: Path) -> Resolved:
    if path.suffix in _PICKLES:
        raise SourceError(f"{path}: pickled weights can run code and are never loaded; use safetensors or GGUF")
    if path.suffix == ".safetensors":
        raise SourceError(f"{path}: one file of a checkpoint; give the folder that holds it and its config.json")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise SourceError(f"{path}: not a GGUF file; give a checkpoint folder, a .gguf file, a hub id or 'demo'")
    return Resolved(path.stem, lambda: GGUFSource(path))
