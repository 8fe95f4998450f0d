"""Arrays for a kernel's Problem, made on the device from a seed: random, valid, and as large as the problem says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsqueeze.bench import random_arrays
from jaxsqueeze.bench.timing import Args

JUNK = 99.0  # in V where nothing was written: finite, and seen at once in a result
_SPACING = 16  # seeds of one call's arrays

# How many of an op's first arguments it updates in place.
CARRIED = {"kv_write": 2}


@dataclasses.dataclass(frozen=True)
class Fill:
    """``seed``: of all values. ``ragged``: rows differ: in attention in length, one of them masked (otherwise each
    fills its pages), in sampling in their filters, in a grouped matmul in whether they have an expert. ``poison``:
    places that were never written hold NaN where the op allows it. ``pages``: of the pool of ``kv_write``."""

    seed: int
    ragged: bool = False
    poison: bool = False
    pages: int = 4096


def make(op: str, problem: Any, fill: Fill) -> Args:
    """The arguments of ``dispatch.call`` for the problem. Raises ValueError for an op that is not known here."""
    if op not in _MAKERS:
        raise ValueError(f"no inputs are known for op {op!r}")
    return _MAKERS[op](problem, fill)


def shapes(op: str, problem: Any, fill: Fill) -> Args:
    """Of what ``make`` makes."""
    if op == "kv_write":
        return problem.inputs(fill.pages)
    if op == "paged_attention":
        return problem.inputs(1 + int(_pages(problem, fill).sum()))
    return problem.inputs()


def _values(seed: int, shape: jax.ShapeDtypeStruct | None, scale: float = 1.0) -> jax.Array | None:
    return None if shape is None else random_arrays.values(seed, shape.shape, shape.dtype, scale)


def _scales(seed: int, shape: jax.ShapeDtypeStruct | None, largest: float) -> jax.Array | None:
    return None if shape is None else random_arrays.uniform(seed, shape.shape, shape.dtype, largest / 2, largest)


def _kv_write(problem: Any, fill: Fill) -> Args:
    pages, scales, new, *_ = problem.inputs(fill.pages)
    seed = _SPACING * fill.seed
    rng = np.random.default_rng(fill.seed)
    # Each token has a place of its own, as a step's have; page 0 is nobody's.
    place = rng.choice((fill.pages - 1) * problem.page_size, problem.T, replace=False) + problem.page_size
    page, offset = (jnp.asarray(x, jnp.int32) for x in np.divmod(place, problem.page_size))
    return _values(seed, pages), _scales(seed + 1, scales, 1.0), _values(seed + 2, new), page, offset


def lengths(problem: Any, fill: Fill) -> np.ndarray:
    """Of ``paged_attention``: tokens of each row, i32[N]; 0 for a masked row."""
    longest = problem.P * problem.page_size
    if not fill.ragged:
        return np.full(problem.N, longest, np.int32)
    rng = np.random.default_rng(fill.seed)
    some = rng.integers(problem.Q, longest, size=problem.N, endpoint=True)
    some[0] = longest
    if problem.N > 1:
        some[-1] = 0
    return some.astype(np.int32)


def _pages(problem: Any, fill: Fill) -> np.ndarray:
    return -(-lengths(problem, fill) // problem.page_size)


def _paged_attention(problem: Any, fill: Fill) -> Args:
    p = problem
    length = lengths(p, fill)
    used = _pages(p, fill)
    rng = np.random.default_rng(fill.seed)
    page_ids = rng.permutation(np.arange(1, used.sum() + 1))  # page 0 is nobody's
    table = np.zeros((p.N, p.P), np.int32)
    written = np.zeros((len(page_ids) + 1, p.page_size), bool)
    for row, ids in enumerate(np.split(page_ids, np.cumsum(used)[:-1])):
        table[row, : len(ids)] = ids
        written[ids] = np.arange(len(ids) * p.page_size).reshape(-1, p.page_size) < length[row]
    positions = length[:, None] - p.Q + np.arange(p.Q)
    positions = np.where(length[:, None] > 0, positions, -1)
    q, k, v, _, base, _, k_scales, v_scales, sinks = p.inputs(len(written))
    seed = _SPACING * fill.seed
    k, v = _values(seed, k), _values(seed + 1, v)
    k_scales, v_scales = _scales(seed + 2, k_scales, 0.05), _scales(seed + 3, v_scales, 0.05)
    if fill.poison:
        k, v = _unwritten(k, written, jnp.nan), _unwritten(v, written, JUNK)
        k_scales, v_scales = _unwritten(k_scales, written, jnp.nan), _unwritten(v_scales, written, jnp.nan)
    return (
        _values(seed + 4, q),
        k,
        v,
        jnp.asarray(table),
        jnp.zeros(base.shape, base.dtype),
        jnp.asarray(positions, jnp.int32),
        k_scales,
        v_scales,
        _values(seed + 5, sinks),
    )


def _unwritten(pages: jax.Array | None, written: np.ndarray, value: float) -> jax.Array | None:
    """[pages, K, page_size, ...] with ``value`` where nothing was written; codes stay: they cannot be NaN."""
    if pages is None or not jnp.issubdtype(pages.dtype, jnp.floating):
        return pages
    mask = written[:, None, :].reshape(len(written), 1, -1, *(1,) * (pages.ndim - 3))
    return jnp.where(mask, pages, value)


def _quant_matmul(problem: Any, fill: Fill) -> Args:
    return _matmul_arrays(problem, _SPACING * fill.seed, problem.inputs())


def _matmul_arrays(problem: Any, seed: int, shapes: Args) -> Args:
    x, codes, scales, zeros = shapes
    largest = {"int8": 127, "w8a8": 127, "fp8": 3, "int4": 7, "fp4": 6, "int2": 2}.get(problem.format, 1)
    return (
        _values(seed, x),
        _values(seed + 1, codes),
        _scales(seed + 2, scales, 1 / largest),
        _scales(seed + 3, zeros, largest),
    )


def group_sizes(problem: Any, fill: Fill) -> np.ndarray:
    """Of ``moe_matmul``: rows of each expert, i32[E], as a router that favours none leaves them; ragged: one expert
    has no rows, and some rows no expert."""
    rng = np.random.default_rng(fill.seed)
    share = np.ones(problem.E)
    rows = problem.T
    if fill.ragged:
        share[rng.integers(problem.E)] = 0
        rows -= rows // 8
    return rng.multinomial(rows, share / share.sum()).astype(np.int32)


def _moe_matmul(problem: Any, fill: Fill) -> Args:
    x, *weight, groups = problem.inputs()
    sizes = group_sizes(problem, fill)
    seed = _SPACING * fill.seed
    rows, codes, scales, zeros = _matmul_arrays(problem, seed, (x, *weight))
    if fill.poison:
        rows = rows.at[sizes.sum() :].set(jnp.nan)
    return rows, codes, scales, zeros, jnp.asarray(sizes, groups.dtype)


def _sample_topk(problem: Any, fill: Fill) -> Args:
    x, top_k, top_p, min_p = problem.inputs()
    row = np.arange(problem.B)
    if not fill.ragged:  # what most requests ask for
        filters = np.full(problem.B, 50), np.full(problem.B, 0.95), np.zeros(problem.B)
    else:  # each filter alone, all of them, none
        filters = (
            np.where(np.isin(row % 5, (0, 3)), 40, problem.V),
            np.where(np.isin(row % 5, (1, 3)), 0.9, 1.0),
            np.where(np.isin(row % 5, (2, 3)), 0.02, 0.0),
        )
    logits = _values(_SPACING * fill.seed, x, 3.0)
    return logits, *(jnp.asarray(f, s.dtype) for f, s in zip(filters, (top_k, top_p, min_p), strict=True))


_MAKERS: dict[str, Callable[[Any, Fill], Args]] = {
    "moe_matmul": _moe_matmul,
    "kv_write": _kv_write,
    "paged_attention": _paged_attention,
    "quant_matmul": _quant_matmul,
    "sample_topk": _sample_topk,
}
