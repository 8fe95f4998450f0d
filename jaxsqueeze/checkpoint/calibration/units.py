"""Units of parameters calibrated one after another, each on what the quantised ones before it give.

    WORK/params/<unit>/   a layer that is done, written whole or not at all (see orbax_units.py)
    WORK/<unit>.key       what decided it: it is used again only where that is the same

A conversion that was killed goes on at the first layer that is missing: those before it only run forward. Never more
is held than one layer's float weights, the moments of its inputs, and the text's hidden states.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxsqueeze.checkpoint import layout
from jaxsqueeze.checkpoint.assemble import Job, build, build_unit
from jaxsqueeze.checkpoint.calibration import layer
from jaxsqueeze.checkpoint.calibration.forward import advance, statistics
from jaxsqueeze.checkpoint.calibration.text import ROWS
from jaxsqueeze.checkpoint.durable import fsync_tree
from jaxsqueeze.checkpoint.manifest import current_versions
from jaxsqueeze.checkpoint.orbax_units import PARAMS, read_unit, write_unit
from jaxsqueeze.checkpoint.source import Report, cast, identity
from jaxsqueeze.models.families import rules
from jaxsqueeze.quant import qtensor
from jaxsqueeze.quant.qtensor import QTensor
from jaxsqueeze.quant.scheme import Scheme, to_json


def discard(work: Path) -> None:
    """Removes what was kept in ``work``, and the folder if nothing else is in it."""
    if work.is_dir():
        shutil.rmtree(work / PARAMS, ignore_errors=True)
        for mark in (*work.glob("*.key"), *work.glob("*.partial")):
            mark.unlink()
        if not any(work.iterdir()):
            work.rmdir()


class CalibratedUnits:
    """``build`` gives the stored arrays of each unit, asked for in the order of ``job.units``."""

    def __init__(
        self,
        job: Job,
        dtype: np.dtype,
        schemes: Mapping[str, Scheme],
        windows: np.ndarray,
        work: Path,
        orbax: ocp.Checkpointer,
        report: Report,
    ) -> None:
        """``windows``: i32[n, length] (see text.py); ``work``: folder of the layers that are done."""
        self._job, self._dtype, self._schemes = job, dtype, schemes
        self._windows, self._work, self._orbax, self._report = windows, work, orbax, report
        self._hidden: np.ndarray | None = None  # f32[n, length, H]: what the next layer is given
        facts = (identity(job.source.files()), str(dtype), repr(windows.shape), sorted(current_versions().items()))
        self._key = hashlib.sha256(repr(facts).encode() + windows.tobytes()).hexdigest()
        self._done = 0  # steps, for the report
        batches = len(windows) // ROWS
        self._steps = job.config.num_layers * 2 * batches + sum(p.startswith("layers_") for p in schemes)

    def build(self, unit: str) -> dict[str, Any]:
        """The nested stored arrays of one unit, as assemble.build_unit gives them."""
        if unit == "embed":
            tree = build_unit(self._job, unit, self._dtype, self._schemes)
            self._chain(unit)
            self._hidden = self._embed(tree["weight"])
            return tree
        if not unit.startswith("layers_"):
            self._hidden = None
            return build_unit(self._job, unit, self._dtype, self._schemes)
        self._chain(unit)
        mark, folder = self._work / f"{unit}.key", self._work / PARAMS / unit
        if mark.is_file() and mark.read_text() == self._key:
            tree = read_unit(self._orbax, self._work, unit, self._like(unit))
            self._tick(len(self._windows) // ROWS + len(self._own_schemes(unit)))
        else:
            tree = self._calibrate(unit)
            mark.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            write_unit(self._orbax, self._work, unit, tree)
            fsync_tree(folder)
            partial = mark.with_suffix(".partial")
            partial.write_text(self._key)
            partial.rename(mark)
        self._advance(unit, tree)
        return tree

    def _calibrate(self, unit: str) -> dict[str, Any]:
        job, own = self._job, self._own_schemes(unit)
        # Codes that the source has in the scheme that is asked for are taken as they are.
        taken = {path: scheme for path, scheme in own.items() if job.stored.get(f"{unit}/{path}") == scheme}
        schemes = {path: scheme for path, scheme in own.items() if path not in taken}
        params = self._floats(unit)
        if schemes:
            cfg, names = job.config, tuple(path.removesuffix("/weight") for path in schemes)
            kind = cfg.layers[int(unit.removeprefix("layers_"))]
            tree = unflatten_dict(params, sep="/")
            seen = statistics(cfg, kind, tree, self._hidden, names, self._tick)
            params = layer.quantise(cfg, params, seen, schemes, self._tick)
        else:
            self._tick(len(self._windows) // ROWS)
        if taken:
            self._tick(len(taken))
        arrays = {}
        source = _flat(build_unit(job, unit, self._dtype, self._schemes), own) if taken else {}
        for path, value in params.items():
            if path in taken:
                arrays[path] = source[path]
            elif isinstance(value, QTensor):
                arrays[path] = {name: np.asarray(x) for name, x in value.arrays.items()}
            else:
                arrays[path] = cast(np.asarray(value), rules.stored_dtype(f"{unit}/{path}", self._dtype))
        return unflatten_dict(arrays, sep="/")

    def _advance(self, unit: str, tree: dict[str, Any]) -> None:
        """Runs the layer as it is stored, with its weights expanded."""
        schemes, cfg = self._own_schemes(unit), self._job.config
        params = {}
        for path, value in _flat(tree, schemes).items():
            if path in schemes:
                shape = rules.param_shape(cfg, f"{unit}/{path}")
                value = qtensor.from_arrays(jax.tree.map(jnp.asarray, value), schemes[path], shape).dequantise()
            params[path] = jnp.asarray(value, jnp.float32)
        kind = cfg.layers[int(unit.removeprefix("layers_"))]
        advance(cfg, kind, unflatten_dict(params, sep="/"), self._hidden, self._tick)

    def _embed(self, weight: Any) -> np.ndarray:
        cfg, ids = self._job.config, self._windows.reshape(-1)
        if (scheme := self._schemes.get("embed/weight")) is not None:
            table = qtensor.from_arrays(weight, scheme, rules.param_shape(cfg, "embed/weight"))
            rows = np.concatenate([table.take(part) for part in np.array_split(ids, len(self._windows))])
        else:
            rows = weight[ids]
        rows = cast(np.asarray(rows), np.dtype(np.float32)) * np.float32(np.asarray(cfg.embed_scale, self._dtype))
        return rows.reshape(*self._windows.shape, -1)

    def _floats(self, unit: str) -> dict[str, jax.Array]:
        """The unit's parameters in f32, by path without the unit's name."""
        f32 = np.dtype(np.float32)
        return {p.removeprefix(f"{unit}/"): jnp.asarray(build(self._job, p, f32)) for p in self._job.paths(unit)}

    def _own_schemes(self, unit: str) -> dict[str, Scheme]:
        start = f"{unit}/"
        return {path.removeprefix(start): s for path, s in self._schemes.items() if path.startswith(start)}

    def _like(self, unit: str) -> dict[str, Any]:
        stored = {p: layout.stored(self._job.config, p, self._dtype, self._schemes) for p in self._job.paths(unit)}
        return unflatten_dict(stored, sep="/")[unit]

    def _chain(self, unit: str) -> None:
        """The key of a layer holds those of all before it."""
        own = json.dumps([unit, to_json(self._own_schemes(unit))], sort_keys=True)
        self._key = hashlib.sha256((self._key + own).encode()).hexdigest()

    def _tick(self, steps: int = 1) -> None:
        self._done += steps
        self._report("calibrating", self._done, self._steps)


def _flat(tree: dict[str, Any], schemes: Mapping[str, Scheme]) -> dict[str, Any]:
    """Stored arrays by path; those of a quantised weight stay together."""
    flat = flatten_dict(tree, is_leaf=lambda keys, _: "/".join(keys) in schemes)
    return {"/".join(keys): value for keys, value in flat.items()}
