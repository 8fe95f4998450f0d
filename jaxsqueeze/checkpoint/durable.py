"""Folders that appear whole or not at all.

A folder is built under a hidden name beside its place, flushed to disk, and renamed. A process killed at any moment
leaves either the old folder, or nothing, and a hidden remnant that the next run removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


class Busy(RuntimeError):
    """Another process holds the lock."""


@contextlib.contextmanager
def exclusive(target: Path, *, wait: bool) -> Iterator[None]:
    """Holds the lock of ``target`` (a hidden file beside it); raises Busy if it is taken and ``wait`` is false."""
    lock = target.with_name(f".{target.name}.lock")
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(fd)
            raise Busy(str(target)) from None
        # The last holder removes the file: a lock on a removed one protects nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(fd).st_ino == lock.stat().st_ino:
                break
        os.close(fd)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            lock.unlink()
        os.close(fd)


def recover(out: Path) -> None:
    """Cleans up after a run that was killed; the caller holds ``exclusive(out)``."""
    partial, old = _hidden(out)
    if old.exists() and not out.exists():
        old.rename(out)  # killed between the two renames that replace a folder
    for remnant in (partial, old):
        shutil.rmtree(remnant, ignore_errors=True)


@contextlib.contextmanager
def building(out: Path) -> Iterator[Path]:
    """A fresh folder to fill; when the block ends well it takes the place of ``out``, else it is removed.

    The caller holds ``exclusive(out)`` and has called ``recover(out)``.
    """
    partial, old = _hidden(out)
    partial.mkdir()
    try:
        yield partial
        fsync_tree(partial)
        if out.exists():
            out.rename(old)
        partial.rename(out)
        _fsync(out.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not out.exists():
            old.rename(out)
        raise


def fsync_tree(folder: Path) -> None:
    """Flushes every file and folder below, the folder itself last."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            _fsync(Path(root, name))
        _fsync(Path(root))


def _hidden(out: Path) -> tuple[Path, Path]:
    return out.with_name(f".{out.name}.partial"), out.with_name(f".{out.name}.old")


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
