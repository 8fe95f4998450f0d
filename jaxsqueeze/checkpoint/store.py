"""Reads a converted folder back into device memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxsqueeze.checkpoint import layout
from jaxsqueeze.checkpoint.manifest import read_manifest
from jaxsqueeze.checkpoint.orbax_units import checkpointer, read_unit
from jaxsqueeze.checkpoint.source import DTYPES, DTypeName, Report, SourceError, cast, quiet
from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.families import rules, tensor_plan, units
from jaxsqueeze.quant import qtensor

Placement = jax.sharding.Sharding | Callable[[str], jax.sharding.Sharding] | None
_READERS = 4  # units read at once


def load_params(
    folder: Path,
    cfg: ModelConfig | None = None,
    *,
    dtype: DTypeName | None = None,
    sharding: Placement = None,
    report: Report = quiet,
) -> dict[str, Any]:
    """All parameters as a nested dict of jax arrays and QTensors (layout: ``models/families/rules.py``).

    ``cfg``: the config the caller will run, checked against the stored shapes; default the manifest's. ``dtype``:
    weights that are not quantised are cast to it (norm scales stay float32); default as stored. ``sharding``: where
    arrays go, one for all or by parameter path; default: the first device. SourceError for a damaged folder.
    """
    manifest = read_manifest(folder)
    cfg = manifest.config if cfg is None else cfg
    target = DTYPES[dtype or manifest.dtype]
    names = units(cfg)
    if tuple(names) != manifest.units:
        raise SourceError(f"{folder}: holds {len(manifest.units)} units, not the {len(names)} of this config")

    def load(unit: str) -> dict[str, Any]:
        paths = [path for path in tensor_plan(cfg) if path.startswith(f"{unit}/")]
        schemes = manifest.schemes
        arrays = {path: layout.stored(cfg, path, DTYPES[manifest.dtype], schemes) for path in paths}
        like = unflatten_dict(arrays, sep="/")[unit]
        tree = read_unit(orbax, folder, unit, like)

        def place(keys: tuple[Any, ...], value: np.ndarray, expected: jax.ShapeDtypeStruct) -> jax.Array:
            path = "/".join([unit, *(k.key for k in keys)])
            if value.shape != expected.shape or value.dtype != expected.dtype:
                raise SourceError(
                    f"{folder}: {path} is {value.dtype}{list(value.shape)}, not {expected.dtype}"
                    f"{list(expected.shape)}; delete the folder and convert again"
                )
            if path in arrays:
                value = cast(value, rules.stored_dtype(path, target))
            return jax.device_put(value, sharding(path) if callable(sharding) else sharding)

        placed = jax.tree_util.tree_map_with_path(place, tree, like)
        leaves = flatten_dict({unit: placed}, is_leaf=lambda keys, _: "/".join(keys) in arrays)
        for keys, value in leaves.items():
            if (path := "/".join(keys)) in schemes:
                leaves[keys] = qtensor.from_arrays(value, schemes[path], rules.param_shape(cfg, path))
        return unflatten_dict(leaves)[unit]

    params: dict[str, Any] = {}
    with checkpointer() as orbax, ThreadPoolExecutor(_READERS) as pool:
        for done, (unit, tree) in enumerate(zip(names, pool.map(load, names), strict=True), start=1):
            params[unit] = tree
            report("loading", done, len(names))
    return params
