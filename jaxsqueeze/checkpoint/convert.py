"""Converts a TensorSource into the engine's own store.

    OUT/manifest.json          see manifest.py; written last
    OUT/params/<unit>/         one Orbax PyTree checkpoint per unit: embed, layers_0, ..., final_norm, lm_head
    OUT/tokenizer.json, ...    tokenizer files under their Hugging Face names
    OUT.calibration/           layers that a calibrated conversion has done; removed when OUT is there

Units are built, written and dropped one by one, so private memory is bounded by the largest unit, not by the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxsqueeze.checkpoint.assemble import Job, build_unit, prepare
from jaxsqueeze.checkpoint.calibration.text import Calibration, windows
from jaxsqueeze.checkpoint.calibration.units import CalibratedUnits, discard
from jaxsqueeze.checkpoint.durable import Busy, building, exclusive, recover
from jaxsqueeze.checkpoint.manifest import MANIFEST, Manifest, current_versions, is_converted, read_manifest
from jaxsqueeze.checkpoint.orbax_units import checkpointer, write_unit
from jaxsqueeze.checkpoint.source import DTYPES, DTypeName, Report, SourceError, TensorSource, content_hash, quiet
from jaxsqueeze.quant.scheme import STORED, Recipe, Scheme

UNQUANTISED = Recipe()
# Of a finished folder before it is published: the quality report to store in it, or raises what forbids publishing.
Judge = Callable[[Path], dict[str, Any]]
_SPARE_BYTES = 64 << 20  # tokenizer, manifest, store metadata
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_SPACE_TEXTS = tuple(os.strerror(code).lower() for code in _NO_SPACE)


def convert(
    source: TensorSource,
    out: Path,
    *,
    name: str,
    dtype: DTypeName = "bfloat16",
    recipe: Recipe = UNQUANTISED,
    raised: Mapping[str, Scheme] | None = None,
    judge: Judge | None = None,
    calibration: Calibration | None = None,
    force: bool = False,
    reuse: bool = False,
    report: Report = quiet,
) -> Manifest:
    """Converts ``source`` (called ``name`` in the manifest) into the folder ``out``.

    ``recipe``: which weights are quantised, and how; the others are stored in ``dtype``, those that ``source`` has
    quantised too. ``raised``: some of the quantised ones that get a wider scheme than the recipe's. What ``judge``
    raises passes through, and nothing was written.
    ``calibration``: the layers' weights are rounded for what this text gives them; the nearest codes otherwise.
    ``force`` replaces a converted folder that is there, and nothing else. ``reuse`` is for a cache: waits for another
    process that is converting to ``out``, takes a good folder as it is, replaces a damaged one. SourceError: nothing
    was written.
    """
    out = out.absolute()
    if not reuse:
        check_place(out, force)
    job = prepare(source)
    schemes, raised = chosen(job, recipe), raised or {}
    assert set(raised) <= set(schemes)
    schemes |= raised
    read = None if calibration is None else windows(job, calibration)
    work = calibration_folder(out)
    made = _make_parents(out.parent)
    try:
        with exclusive(out, wait=reuse):
            recover(out)
            if reuse and is_converted(out):
                with contextlib.suppress(SourceError):
                    return read_manifest(out)
            elif not reuse:
                check_place(out, force)
            _check_space(job, out, dtype, schemes)
            with building(out) as partial:
                what = _Conversion(job, name, dtype, recipe, raised, schemes, read)
                manifest = _write(what, partial, work, report)
                if judge is not None:
                    manifest = dataclasses.replace(manifest, quality=judge(partial))
                    (partial / MANIFEST).write_bytes(manifest.to_bytes())
            discard(work)
            return manifest
    except Busy:
        raise SourceError(f"{out}: another process is converting to this folder; wait for it to end") from None
    except PermissionError as error:
        raise SourceError(f"{error.filename or out}: permission denied; choose another OUT") from error
    except Exception as error:
        if _is_disk_full(error):
            raise SourceError(f"{out}: the disk is full; free some space or choose another OUT") from error
        raise
    finally:
        for folder in made:  # only those still empty go
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


@dataclasses.dataclass(frozen=True)
class _Conversion:
    """``raised``: those of ``schemes`` that are not the recipe's; ``read``: windows of the calibration's text."""

    job: Job
    name: str
    dtype: DTypeName
    recipe: Recipe
    raised: Mapping[str, Scheme]
    schemes: dict[str, Scheme]
    read: np.ndarray | None

    @property
    def quantisation(self) -> str:
        """See ``Manifest``."""
        if not self.schemes:
            return "none"
        if self.recipe.weights == STORED:
            source, plan = self.job.source, self.job.plan
            forms = Counter(source.form(plan[path].sources[0]) for path in self.schemes if path not in self.raised)
            names = [form for form, _ in forms.most_common()]
        else:
            names = [str(self.recipe.scheme)]
        for name, n in Counter(map(str, self.raised.values())).items():
            names.append(f"{n} of {len(self.schemes)} weights {name}")
        return ", ".join(names if self.read is None else [*names, "calibrated"])

    @property
    def notes(self) -> tuple[str, ...]:
        """See ``Manifest``."""
        mixed = self.job.mixed if self.recipe.weights == STORED else ()
        if not mixed:
            return tuple(self.job.source.notes)
        expanded = (
            f"{len(mixed)} weights, like {mixed[0]}, were expanded: the checkpoint stores the parts of each in "
            "different ways"
        )
        return *self.job.source.notes, expanded


def _write(what: _Conversion, folder: Path, work: Path, report: Report) -> Manifest:
    """``work``: where a calibration keeps what it has done."""
    job, dtype, schemes = what.job, DTYPES[what.dtype], what.schemes
    total, done = job.nbytes(dtype, schemes), 0
    for file_name, data in job.tokenizer_files.items():
        (folder / file_name).write_bytes(data)
    with _background_hash(job) as source_hash, checkpointer() as orbax:
        build = functools.partial(build_unit, job, dtype=dtype, schemes=schemes)
        if what.read is not None:
            build = CalibratedUnits(job, dtype, schemes, what.read, work, orbax, report).build
        for unit in job.units:
            report("converting", done, total)
            write_unit(orbax, folder, unit, build(unit))
            done += job.nbytes(dtype, schemes, unit)
        report("converting", total, total)
        files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
        manifest = Manifest(
            config=job.config,
            dtype=what.dtype,
            schemes=schemes,
            quantisation=what.quantisation,
            notes=what.notes,
            source=what.name,
            source_hash=source_hash.result(),
            units=tuple(job.units),
            files=files,
            versions=current_versions(),
        )
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return manifest


@contextlib.contextmanager
def _background_hash(job: Job) -> Iterator[Future[str]]:
    """The source's hash, computed beside the conversion; given up when the block fails."""
    failed = threading.Event()

    def give_up(*_: object) -> None:
        if failed.is_set():
            raise CancelledError

    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(content_hash, job.source.files(), give_up)
        except BaseException:
            failed.set()
            raise


def chosen(job: Job, recipe: Recipe) -> dict[str, Scheme]:
    """The scheme of each parameter that ``recipe`` stores quantised. SourceError for a pattern that fits none."""
    try:
        return recipe.schemes(job.plan, job.stored)
    except ValueError as error:
        raise SourceError(str(error)) from error


def calibration_folder(out: Path) -> Path:
    """Where the calibration of a conversion to ``out`` is kept until it is published."""
    return out.with_name(f"{out.name}.calibration")


def check_place(out: Path, force: bool) -> None:
    """SourceError if ``out`` holds what may not be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not is_converted(out):
        raise SourceError(f"{out}: exists and is not a converted checkpoint; choose another OUT")
    if not force:
        raise SourceError(f"{out}: exists; pass --force to replace it, or choose another OUT")


def _check_space(job: Job, out: Path, dtype: DTypeName, schemes: dict[str, Scheme]) -> None:
    need = job.nbytes(DTYPES[dtype], schemes) + _SPARE_BYTES
    free = shutil.disk_usage(out.parent).free
    if free < need:
        raise SourceError(
            f"{out}: the disk is full, {need / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free; "
            "free some space or choose another OUT"
        )


def _make_parents(folder: Path) -> list[Path]:
    """Creates ``folder``; returns the folders that were not there, innermost first."""
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return made


def _is_disk_full(error: BaseException | None) -> bool:
    """Whether the disk ran full, also where a storage library reports it as text."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return True
        if any(text in str(error).lower() for text in _NO_SPACE_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False
