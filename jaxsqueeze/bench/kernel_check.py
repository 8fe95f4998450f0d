"""Whether a kernel's result is right: against the op's plain JAX, run on the CPU in float32 on the same inputs.

A 16-bit float is exact in float32, so both compute the same function of the same numbers. Plain JAX itself is held to
float64 in tests/kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxsqueeze.bench.timing import Args
from pallas_kernels import dispatch
from pallas_kernels.target import CPU

HALVES = ("bfloat16", "float16")
LIMIT = {"float32": 1e-3, "half": 1e-2}  # of ||out - expected|| / ||expected||
BORDER = 1e-3  # share of kept words that may be kept by one alone
TIES = 1e-3  # share of codes that may be one step off: at a tie the last bit of a division decides


@dataclasses.dataclass(frozen=True)
class Verdict:
    """``error``: relative, or the share of wrong codes; NaN is never right."""

    error: float
    limit: float

    @property
    def right(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        return f"error {self.error:.1e}, allowed {self.limit:.0e}"


def expected(op: str, problem: Any, args: Args) -> Any:
    """What the op gives, as numpy arrays."""
    host = jax.devices("cpu")[0]
    args = jax.tree.map(lambda x: _widened(np.asarray(x), op), args)
    if getattr(problem, "dtype", "float32") in HALVES and op != "kv_write":  # there the types are the result
        problem = dataclasses.replace(problem, dtype="float32")
    with jax.default_device(host):
        run = jax.jit(functools.partial(dispatch.call, op, dispatch.REFERENCE, problem, {}, CPU))
        return jax.tree.map(np.asarray, run(*args))


def compare(op: str, problem: Any, got: Any, want: Any) -> Verdict:
    """``got``: of ``problem`` on the device; ``want``: see ``expected``."""
    got = jax.tree.map(np.asarray, got)
    if op == "kv_write":
        return _compare_pages(problem, got, want)
    if op == "sample_topk":
        return _compare_filters(got, want)
    limit = LIMIT["half" if problem.dtype in HALVES else "float32"]
    got, want = (np.concatenate([x.astype(np.float64).ravel() for x in jax.tree.leaves(t)]) for t in (got, want))
    norm = np.linalg.norm(want)
    error = np.linalg.norm(got - want) / norm if norm else np.linalg.norm(got)
    return Verdict(float(error) if np.isfinite(error) else float("inf"), limit)


def _widened(x: np.ndarray, op: str) -> np.ndarray:
    return x.astype(np.float32) if op != "kv_write" and x.dtype.name in HALVES else x


def _compare_pages(problem: Any, got: Any, want: Any) -> Verdict:
    """Page 0 may hold anything. Bits must agree; codes may differ by one at a tie, scales in their last bits."""
    (pages, scales), (want_pages, want_scales) = ([x if x is None else x[1:] for x in pair] for pair in (got, want))
    differ = pages.view(f"u{pages.itemsize}") != want_pages.view(f"u{pages.itemsize}")
    share = float(differ.mean())
    if problem.format not in ("int8", "int4"):
        return Verdict(share, 0.0)
    off = int(np.max(np.abs(_codes(pages, problem.format) - _codes(want_pages, problem.format)), initial=0))
    if off > 1 or not np.allclose(scales, want_scales, rtol=1e-6, atol=0):
        return Verdict(float("inf"), TIES)
    return Verdict(share, TIES)


def _compare_filters(got: Any, want: Any) -> Verdict:
    """Words are kept with their value or not at all; sums in another order may move the border of a nucleus."""
    kept, want_kept = np.isfinite(got), np.isfinite(want)
    both = kept & want_kept
    if np.isnan(got).any() or (got[both] != want[both]).any():
        return Verdict(float("inf"), BORDER)
    return Verdict(float((kept != want_kept).sum() / max(1, (kept | want_kept).sum())), BORDER)


def _codes(pages: np.ndarray, format: str) -> np.ndarray:
    return pages.astype(np.int16) if format == "int8" else np.stack([pages & 15, pages >> 4]).astype(np.int16)
