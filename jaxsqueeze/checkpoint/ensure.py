"""What ``serve`` and ``LLM`` call: any SOURCE to a converted folder, converting into the cache on first use."""

from __future__ import annotations

import hashlib
from pathlib import Path

import jax

from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.demo import cache_folder
from jaxsqueeze.checkpoint.manifest import FORMAT_VERSION, is_converted, read_manifest
from jaxsqueeze.checkpoint.resolve import resolve
from jaxsqueeze.checkpoint.source import DTypeName, Report, SourceError, quiet
from jaxsqueeze.quant.scheme import STORED, Recipe


def ensure_converted(
    source: str, dtype: DTypeName = "bfloat16", report: Report = quiet, weights: str | None = None
) -> Path:
    """The converted folder for ``source``: itself if it is one, else the cached conversion, made now if need be.
    ``weights``: as --weights of ``convert``. By default quantised weights stay as they are stored, but on a CPU, where
    bf16 ones are multiplied several times faster than groups of codes.

    Two processes that start together convert once: the second waits for the first. SourceError names what is wrong.
    """
    path = Path(source).expanduser()
    if is_converted(path):
        return path
    resolved = resolve(source, report)
    recipe = Recipe(weights or ("bf16" if jax.default_backend() == "cpu" else STORED))
    key = hashlib.sha256(f"{FORMAT_VERSION}/{dtype}/{recipe.weights}/{resolved.identity()}".encode()).hexdigest()[:16]
    out = cache_folder() / "converted" / f"{resolved.name}-{key}"
    try:
        read_manifest(out)
    except SourceError:  # not there, or damaged: made (again) below
        convert(resolved.open(), out, name=source, dtype=dtype, recipe=recipe, reuse=True, report=report)
    return out
