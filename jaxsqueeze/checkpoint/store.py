"""Reads a converted folder back into device memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxsqueeze.checkpoint.manifest import Manifest, is_converted, read_manifest
from jaxsqueeze.checkpoint.orbax_units import checkpointer, read_unit
from jaxsqueeze.checkpoint.source import DTYPES, DTypeName, Report, SourceError, cast, quiet
from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.families import rules, tensor_plan, units

__all__ = ["Manifest", "is_converted", "load_params", "read_manifest"]

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
    """All parameters as a nested dict of jax arrays (layout: ``models/families/rules.py``).

    ``cfg``: the config the caller will run, checked against the stored shapes; default the manifest's. ``dtype``:
    weights are cast to it (norm scales stay float32); default as stored. ``sharding``: where arrays go, one for all
    or by parameter path; default: the first device. SourceError for a damaged folder.
    """
    manifest = read_manifest(folder)
    cfg = manifest.config if cfg is None else cfg
    target = DTYPES[dtype or manifest.dtype]
    names = units(cfg)
    if tuple(names) != manifest.units:
        raise SourceError(f"{folder}: holds {len(manifest.units)} units, not the {len(names)} of this config")

    def load(unit: str) -> dict[str, Any]:
        like = _nest({p: _stored(cfg, p, manifest.dtype) for p in tensor_plan(cfg) if p.startswith(f"{unit}/")})[unit]
        tree = read_unit(orbax, folder, unit, like)

        def place(keys: tuple[Any, ...], value: np.ndarray, expected: jax.ShapeDtypeStruct) -> jax.Array:
            path = "/".join([unit, *(k.key for k in keys)])
            if value.shape != expected.shape or value.dtype != expected.dtype:
                raise SourceError(
                    f"{folder}: {path} is {value.dtype}{list(value.shape)}, not {expected.dtype}"
                    f"{list(expected.shape)}; delete the folder and convert again"
                )
            value = value if path.endswith("/scale") else cast(value, target)
            return jax.device_put(value, sharding(path) if callable(sharding) else sharding)

        return jax.tree_util.tree_map_with_path(place, tree, like)

    params: dict[str, Any] = {}
    with checkpointer() as orbax, ThreadPoolExecutor(_READERS) as pool:
        for done, (unit, tree) in enumerate(zip(names, pool.map(load, names), strict=True), start=1):
            params[unit] = tree
            report("loading", done, len(names))
    return params


def _stored(cfg: ModelConfig, path: str, dtype: DTypeName) -> jax.ShapeDtypeStruct:
    stored = np.dtype(np.float32) if path.endswith("/scale") else DTYPES[dtype]
    return jax.ShapeDtypeStruct(rules.param_shape(cfg, path), stored)


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, leaf = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[leaf] = value
    return tree
