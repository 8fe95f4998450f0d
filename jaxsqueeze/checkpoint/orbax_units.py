"""One unit of parameters as one Orbax PyTree checkpoint, ``params/<unit>/`` of a converted folder.

Values are stored uncompressed: weights hardly compress, and reading is three times quicker so. Chunks of 32 MiB are
written and read in parallel.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxsqueeze.checkpoint.source import SourceError

PARAMS = "params"
_CHUNK_BYTES = 32 << 20


@contextmanager
def checkpointer() -> Iterator[ocp.Checkpointer]:
    """Writes and reads units; safe to share between threads that read."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.CRITICAL)  # otherwise several lines per unit; errors are raised as well
    try:
        with (
            _late_failures_unsaid(),
            ocp.Checkpointer(
                ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)
            ) as orbax,
        ):
            yield orbax
    finally:
        log.setLevel(level)


@contextmanager
def _late_failures_unsaid() -> Iterator[None]:
    """When chunks fail together (a full disk), the first failure is raised and the event loop closed; the others then
    cannot be delivered, which Python would print. They may come after the block, so a failed block keeps the hook."""
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            previous(unraisable)

    sys.unraisablehook = hook
    yield
    sys.unraisablehook = previous


def write_unit(orbax: ocp.Checkpointer, folder: Path, unit: str, tree: dict[str, Any]) -> None:
    """Stores a nested dict of numpy arrays."""
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    orbax.save(folder.absolute() / PARAMS / unit, ocp.args.PyTreeSave(tree, save_args=save_args))


def read_unit(orbax: ocp.Checkpointer, folder: Path, unit: str, like: dict[str, Any]) -> dict[str, Any]:
    """The stored arrays, as numpy. ``like``: the nested dict expected there (leaves with shape and dtype)."""
    path = folder.absolute() / PARAMS / unit
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    try:
        return orbax.restore(path, ocp.args.PyTreeRestore(item=like, restore_args=restore_args))
    except Exception as error:
        raise SourceError(f"{path}: damaged ({type(error).__name__}); delete the folder and convert again") from error
