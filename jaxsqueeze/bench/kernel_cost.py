"""The least that an op must do: bytes through the device's memory, each read or written once, and operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxsqueeze.bench import kernel_inputs
from jaxsqueeze.bench.kernel_inputs import Fill
from jaxsqueeze.bench.timing import Args
from pallas_kernels.target import Target

_LEAST_US = 2.0  # no launch on a GPU takes less
# Bytes and operations a second of no device so far; on a CPU, where an op takes its time, of none that is awaited.
_FASTEST = {"cuda": (8e12, 2.5e15), "cpu": (1e8, 1e9)}


@dataclasses.dataclass(frozen=True)
class Cost:
    """``operations``: multiplications and additions of matmuls."""

    bytes: int
    operations: int = 0

    def floor_us(self, target: Target) -> float:
        """Microseconds; no call is quicker on any device of the target's platform."""
        bytes_per_s, operations_per_s = _FASTEST[target.platform]
        return max(_LEAST_US, self.bytes / bytes_per_s * 1e6, self.operations / operations_per_s * 1e6)


def cost(op: str, problem: Any, fill: Fill) -> Cost:
    """Of one call on ``kernel_inputs.make(op, problem, fill)``."""
    return _COSTS[op](problem, fill)


def _size(shapes: Args) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def _kv_write(problem: Any, fill: Fill) -> Cost:
    pages, scales, new, *where = problem.inputs(1)
    token = _size((pages, scales)) // problem.page_size
    return Cost(_size((new, *where)) + problem.T * token)


def _paged_attention(problem: Any, fill: Fill) -> Cost:
    p = problem
    length = kernel_inputs.lengths(p, fill).astype(np.int64)
    q, k, v, _, base, positions, k_scales, v_scales, sinks = p.inputs(1)
    first = np.maximum(length - p.Q + 1 - p.window, 0) if p.window else 0  # key that the first query sees
    keys = int((length - first).sum())
    pages = int((-(-length // p.page_size)).sum())
    token = _size((k, v, k_scales, v_scales)) // p.page_size
    size = keys * token + 4 * pages + 2 * _size(q) + _size((base, positions, sinks))
    # Query i of Q sees the keys up to its own.
    behind = np.arange(p.Q)[::-1]
    seen = np.maximum(length[:, None] - behind, 0)
    seen = int((np.minimum(seen, p.window) if p.window else seen).sum())
    return Cost(size, 4 * seen * p.K * p.G * p.D)


def _quant_matmul(problem: Any, fill: Fill) -> Cost:
    p = problem
    return Cost(_size(p.inputs()) + 4 * p.T * p.out, 2 * p.T * p.out * p.width)


def _moe_matmul(problem: Any, fill: Fill) -> Cost:
    p, sizes = problem, kernel_inputs.group_sizes(problem, fill)
    x, *weight, groups = p.inputs()
    routed = int((sizes > 0).sum()) * _size(tuple(weight)) // p.E
    return Cost(_size((x, groups)) + routed + 4 * p.T * p.out, 2 * int(sizes.sum()) * p.out * p.width)


def _sample_topk(problem: Any, fill: Fill) -> Cost:
    return Cost(2 * _size(problem.inputs()[:1]))


_COSTS: dict[str, Callable[[Any, Fill], Cost]] = {
    "kv_write": _kv_write,
    "moe_matmul": _moe_matmul,
    "paged_attention": _paged_attention,
    "quant_matmul": _quant_matmul,
    "sample_topk": _sample_topk,
}
