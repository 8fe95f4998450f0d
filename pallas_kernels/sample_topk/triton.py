"""Filters on a GPU in three launches: the row is read twice by many programs, then one program a row works on the few
words that matter.

1. ``_maxima``: the maximum of each group of neighbouring words, between half a capacity and one capacity of groups.
2. ``_candidates``: a cut that a quarter of a capacity of those maxima reach, hence at least as many words. The words
   from the cut on are written out chunk by chunk, with their count and the chunk's whole mass.
3. ``_thresholds``: the exact thresholds, by a five-way search on the order-preserving integers of f32 over the
   candidates. They hold the answer if they are at least top_k or have top_p of the mass. Where they do not (nearly
   flat rows, a large top_k), or are more than a capacity, the whole row is searched: right, and slow.

Small vocabularies take the third launch alone, over the whole row. The thresholds are then applied by XLA, in the pass
over the row that follows anyway. All sums have a fixed order; a row without a filter is not read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.launch import Launch, Launcher
from pallas_kernels.sample_topk.problem import Problem
from pallas_kernels.target import Target
from pallas_kernels.tuning import Tile

_WHOLE = 8192  # rows up to this are searched without candidates


def tiles(problem: Problem, target: Target) -> tuple[Tile, ...]:
    """``chunk``: words of a program of the first two launches, 0: only the third; ``capacity``: words that the third
    takes at once; ``warps``: of the third."""
    if problem.V >= 2**24:
        raise NotImplementedError("words are counted in f32, which is exact below 2^24")
    if problem.V <= _WHOLE:
        capacity = min(2048, triton.next_power_of_2(problem.V))
        return tuple({"chunk": 0, "capacity": c, "warps": max(1, c // 128)} for c in (capacity, max(1, capacity // 2)))
    chunk = triton.next_power_of_2(problem.B * problem.V // (2 * target.cores) + 1)
    chunk = min(max(chunk, 8192), 32768)
    return (
        {"chunk": chunk, "capacity": 4096, "warps": 16},
        {"chunk": chunk // 2, "capacity": 4096, "warps": 16},
        {"chunk": chunk * 2, "capacity": 4096, "warps": 16},
        {"chunk": chunk, "capacity": 4096, "warps": 8},
        {"chunk": chunk, "capacity": 2048, "warps": 8},
        {"chunk": 0, "capacity": 2048, "warps": 8},
    )


def run(
    problem: Problem,
    tile: Tile,
    launcher: Launcher,
    x: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> jax.Array:
    """See ``api.sample_topk``."""
    p, capacity = problem, tile["capacity"]
    if p.B == 0:
        return x
    chunk = tile["chunk"]
    maxima, found = x, ()
    constants = {"V": p.V, "G": p.V, "CAPACITY": capacity}
    if chunk:
        width = max(1, triton.next_power_of_2(triton.cdiv(p.V, capacity)))
        chunks = triton.cdiv(p.V, chunk)
        shape = jax.ShapeDtypeStruct
        constants["G"] = triton.cdiv(p.V, width)
        parts = {"CHUNK": chunk, "BLOCK": min(chunk, max(width, 2048))}
        outs = (shape((p.B, constants["G"]), jnp.float32),)
        launch = Launch(_maxima, (p.B, chunks), outs, {"V": p.V, "G": constants["G"], "WIDTH": width, **parts})
        (maxima,) = launcher(launch, x, top_k, top_p, min_p)
        outs = (
            shape((p.B, chunks, min(chunk, capacity)), jnp.float32),
            shape((p.B, chunks), jnp.int32),
            shape((p.B, chunks), jnp.float32),
        )
        launch = Launch(_candidates, (p.B, chunks), outs, constants | parts, num_warps=8)
        found = launcher(launch, x, top_k, top_p, maxima)
        constants |= {"CHUNKS": chunks, "KEPT": min(chunk, capacity)}
    kernel = _thresholds if chunk else _thresholds_of_rows
    out = jax.ShapeDtypeStruct((p.B,), jnp.float32)
    launch = Launch(kernel, (p.B,), (out,), constants, num_warps=tile["warps"])
    (threshold,) = launcher(launch, x, top_k, top_p, min_p, *((maxima, *found) if chunk else ()))
    return jnp.where(x >= threshold[:, None], x, -jnp.inf)


@triton.jit
def _order(value):
    """An i32 with the order of f32, -0.0 below 0.0 (of no consequence: the thresholds are compared as f32)."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(order):
    order = order.to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _maximum(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, n, BLOCK):
        best = tl.maximum(best, tl.load(x_ptr + start + i, mask=start + i < n, other=-float("inf")))
    return tl.max(best, axis=0)


@triton.jit
def _largest(x_ptr, place, n, low, high, goal, best, MASS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest threshold in [low, high], as ``_order``, over which lies the goal; over ``low`` it does.

    The goal is a number of words, or with MASS a sum of exp(x - best). Words: ``x_ptr[start + place]``, n in all.
    """
    i = tl.arange(0, BLOCK)
    rounds = 0
    while (low < high) & (rounds < ROUNDS):
        step = (high - low + 4) // 5
        sums = tl.zeros((BLOCK, 2, 2), tl.float32)
        for start in range(0, n, BLOCK):
            x = tl.load(x_ptr + start + place, mask=start + i < n, other=-float("inf"))
            weight = tl.exp(x - best) if MASS else tl.full((BLOCK,), 1.0, tl.float32)
            order = _order(x)
            one = tl.where(order >= (low + step).to(tl.int32), weight, 0.0)
            two = tl.where(order >= (low + 2 * step).to(tl.int32), weight, 0.0)
            three = tl.where(order >= (low + 3 * step).to(tl.int32), weight, 0.0)
            four = tl.where(order >= (low + 4 * step).to(tl.int32), weight, 0.0)
            sums += tl.join(tl.join(one, two), tl.join(three, four))
        reached = tl.sum((tl.sum(sums, axis=0) >= goal).to(tl.int64))
        high = tl.where(reached < 4, tl.minimum(high, low + (reached + 1) * step - 1), high)
        low = tl.minimum(low + reached * step, high)
        rounds += 1
    return low


@triton.jit
def _maxima(
    x_ptr, top_k_ptr, top_p_ptr, min_p_ptr, maxima_ptr,
    V: tl.constexpr, G: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (tl.load(top_k_ptr + row) < V) | (tl.load(top_p_ptr + row) < 1) | (tl.load(min_p_ptr + row) > 0):
        groups = tl.arange(0, BLOCK // WIDTH)
        i = groups[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        for start in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, V), BLOCK):
            x = tl.load(x_ptr + row * V + start + i, mask=start + i < V, other=-float("inf"))
            group = start // WIDTH + groups
            tl.store(maxima_ptr + row * G + group, tl.max(x, axis=1), mask=group < G)


@triton.jit
def _candidates(
    x_ptr, top_k_ptr, top_p_ptr, maxima_ptr, candidates_ptr, counts_ptr, masses_ptr,
    V: tl.constexpr, G: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    KEPT: tl.constexpr = min(CHUNK, CAPACITY)
    top_k = tl.load(top_k_ptr + row)
    if ((top_k < V) & (top_k <= CAPACITY // 4)) | ((top_k >= V) & (tl.load(top_p_ptr + row) < 1)):
        i = tl.arange(0, BLOCK)
        maxima_ptr += row * G
        best = _maximum(maxima_ptr, G, BLOCK)
        low, high = _order(tl.full((), -float("inf"), tl.float32)).to(tl.int64), _order(best).to(tl.int64)
        # One of 5^7 parts of all floats: the cut is less than 1 % lower than need be.
        cut = _value(_largest(maxima_ptr, i, G, low, high, CAPACITY // 4, best, False, 7, BLOCK))
        out_ptr = candidates_ptr + (row * chunks + chunk) * KEPT
        count = 0
        mass = tl.zeros((BLOCK,), tl.float32)
        for start in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, V), BLOCK):
            x = tl.load(x_ptr + row * V + start + i, mask=start + i < V, other=-float("inf"))
            mass += tl.exp(x - best)
            here = ((x >= cut) & (start + i < V)).to(tl.int32)
            place = count + tl.cumsum(here, axis=0) - 1
            tl.store(out_ptr + place, x, mask=(here > 0) & (place < KEPT))
            count += tl.sum(here, axis=0)
        tl.store(counts_ptr + row * chunks + chunk, count)
        tl.store(masses_ptr + row * chunks + chunk, tl.sum(mass, axis=0))


@triton.jit
def _search(x_ptr, place, n, best, top_k, top_p, total, V: tl.constexpr, CAPACITY: tl.constexpr):
    """The threshold of top_k and top_p. ``total``: the mass of the whole row, where there is no top_k."""
    low, high = _order(tl.full((), -float("inf"), tl.float32)).to(tl.int64), _order(best).to(tl.int64)
    if top_k < V:
        low = _largest(x_ptr, place, n, low, high, top_k.to(tl.float32), best, False, 32, CAPACITY)
        total = _mass(x_ptr, place, n, _value(low), best, CAPACITY)
    if top_p < 1:
        low = _largest(x_ptr, place, n, low, high, top_p * total, best, True, 32, CAPACITY)
    return _value(low)


@triton.jit
def _mass(x_ptr, place, n, threshold, best, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        x = tl.load(x_ptr + start + place, mask=start + i < n, other=-float("inf"))
        mass += tl.where(x >= threshold, tl.exp(x - best), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def _floor(threshold, best, min_p):
    """The threshold, raised to min_p times the best."""
    floor = best + tl.log(tl.where(min_p > 0, tl.minimum(min_p, 1.0), 1.0))
    return tl.where(min_p > 0, tl.maximum(threshold, floor), threshold)


@triton.jit
def _thresholds_of_rows(
    x_ptr, top_k_ptr, top_p_ptr, min_p_ptr, threshold_ptr,
    V: tl.constexpr, G: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    threshold = tl.full((), -float("inf"), tl.float32)
    if (top_k < V) | (top_p < 1) | (min_p > 0):
        x_ptr += row * V
        place = tl.arange(0, CAPACITY)
        best = _maximum(x_ptr, V, CAPACITY)
        total = tl.full((), 0.0, tl.float32)
        if (top_k >= V) & (top_p < 1):
            total = _mass(x_ptr, place, V, threshold, best, CAPACITY)
        threshold = _floor(_search(x_ptr, place, V, best, top_k, top_p, total, V, CAPACITY), best, min_p)
    tl.store(threshold_ptr + row, threshold)


@triton.jit
def _thresholds(
    x_ptr, top_k_ptr, top_p_ptr, min_p_ptr, maxima_ptr, candidates_ptr, counts_ptr, masses_ptr, threshold_ptr,
    V: tl.constexpr, G: tl.constexpr, CAPACITY: tl.constexpr, CHUNKS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    threshold = tl.full((), -float("inf"), tl.float32)
    if (top_k < V) | (top_p < 1) | (min_p > 0):
        best = _maximum(maxima_ptr + row * G, G, CAPACITY)
        i = tl.arange(0, CAPACITY)
        words_ptr, place, n = x_ptr + row * V, i, V
        total = tl.full((), 0.0, tl.float32)
        if ((top_k < V) & (top_k <= CAPACITY // 4)) | ((top_k >= V) & (top_p < 1)):
            candidates_ptr += row * CHUNKS * KEPT
            gathered = i
            found = 0
            for chunk in range(0, CHUNKS):
                gathered = tl.where(i >= found, chunk * KEPT + i - found, gathered)
                found += tl.load(counts_ptr + row * CHUNKS + chunk)
                total += tl.load(masses_ptr + row * CHUNKS + chunk)
            fits = found <= CAPACITY
            x = tl.load(candidates_ptr + gathered, mask=i < tl.where(fits, found, 0), other=-float("inf"))
            if fits & ((top_k < V) | (tl.sum(tl.exp(x - best), axis=0) >= top_p * total)):
                words_ptr, place, n = candidates_ptr, gathered, found
        threshold = _floor(_search(words_ptr, place, n, best, top_k, top_p, total, V, CAPACITY), best, min_p)
    tl.store(threshold_ptr + row, threshold)
