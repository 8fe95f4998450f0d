"""Compiled programs on disk, ready to run: a second start neither traces nor lowers nor compiles.

jax's persistent compilation cache is keyed by the lowered program, so it spares the compiling only (demo model, 9
programs: 14.1 s with it, 7.0 s from here). Here the key says all that programs depend on: the sources of these
packages, the versions, the platform, the configuration. The two do not mix: on CPU a program that comes from jax's
cache cannot be saved again (it loads, and misses its functions when it runs).

A file is a pickle and holds machine code: the folder must be as private as any code. One that cannot be read (another
version, half a disk) is as good as none.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import platform
import shutil
import tempfile
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
from jax.experimental import serialize_executable

log = logging.getLogger(__name__)

KEPT = 32  # configurations, the last used ones


class ProgramStore:
    """Programs of one configuration, in a folder below ``root``; None: keeps nothing.

    ``facts``: all that decides what the programs are, besides sources and platform; their ``repr`` tells them apart.
    """

    def __init__(self, root: Path | None, *facts: object) -> None:
        key = hashlib.sha256(repr((_environment(), facts)).encode()).hexdigest()
        self._folder = root and root / key

    def load(self, name: str) -> jax.stages.Compiled | None:
        """The program saved under ``name``, if there is a readable one."""
        if self._folder is None or not (path := self._folder / name).is_file():
            return None
        try:
            program = serialize_executable.deserialize_and_load(*pickle.loads(zlib.decompress(path.read_bytes())))
        except Exception as error:  # damaged bytes can make unpickling raise any type
            log.warning("compiling anew: %s cannot be read (%s)", path, error)
            return None
        with contextlib.suppress(OSError):  # a cache that others may only read
            os.utime(self._folder)
        return program

    def save(self, name: str, program: jax.stages.Compiled) -> None:
        """Keeps the program, whole or not at all; a failure costs the next start its time and is logged."""
        if self._folder is None:
            return
        try:
            data = zlib.compress(pickle.dumps(serialize_executable.serialize(program)), 1)
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder, prefix=".") as work:
                part = Path(work) / name
                part.write_bytes(data)
                part.replace(self._folder / name)
        except Exception as error:  # a full disk, or a runtime that cannot serialize: the program runs all the same
            log.warning("the next start compiles %s again: it cannot be kept (%s)", name, error)

    def prune(self) -> None:
        """Drops the configurations that were not used for longest."""
        if self._folder is None or not self._folder.is_dir():
            return
        with contextlib.suppress(OSError):  # another process may be dropping them too
            folders = sorted(self._folder.parent.iterdir(), key=lambda folder: folder.stat().st_mtime)
            for folder in folders[:-KEPT]:
                shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _environment() -> tuple[object, ...]:
    """What compiles: sources, versions, settings, device, and the instructions that a host's processor knows."""
    sources = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    for root in (package, package.parent / "pallas_kernels"):
        for path in sorted((*root.rglob("*.py"), *root.rglob("*.json"))):  # json: tuned tiles
            sources.update(path.read_bytes())
    device = jax.devices()[0]
    return (
        sources.hexdigest(),
        platform.python_version(),
        [_version(name) for name in ("jax", "jaxlib", "flax", "numpy", "triton", "jax-triton")],
        sorted((name, repr(value)) for name, value in jax.config.values.items()),
        os.environ.get("XLA_FLAGS"),
        (device.platform, device.device_kind, device.client.platform_version, jax.device_count()),
        _processor(),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # the GPU's own
        return None


def _processor() -> object:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return sorted({line for line in lines if line.startswith(("flags", "Features"))})
