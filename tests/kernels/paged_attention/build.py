"""Batches of ragged rows over a pool: what paged attention is given, and what must come out.

Pages are handed out in random order. Everything that was never written is NaN, or a random code with a NaN scale, as
the memory may hold anything and a failed request may leave NaN.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from pallas_kernels.paged_attention.problem import Problem
from tests.kernels.paged_attention.oracle import attend

TOPS = {"int8": 127, "int4": 7}


@dataclasses.dataclass
class Batch:
    """One call. Row n has ``lengths[n]`` tokens written, its table starts at page ``base[n]`` of the row."""

    problem: Problem
    lengths: list[int]
    positions: np.ndarray  # i32[N, Q]
    base: np.ndarray  # i32[N]
    seed: int
    below: bool = False  # all scores are below zero

    def arrays(self, junk_in_v: float = np.nan) -> tuple[list[jax.Array | None], np.ndarray]:
        """Inputs, and the result f64[N, Q, K, G, D]."""
        p, rng = self.problem, np.random.default_rng(self.seed)
        last = max([0, *self.lengths])
        q = rng.normal(size=(p.N, p.Q, p.K, p.G, p.D)).astype(jnp.dtype(p.dtype))
        q = -np.abs(q) if self.below else q
        pages = rng.permutation(np.arange(1, p.N * p.P + 1)).reshape(p.N, p.P)
        table = np.zeros((p.N, p.P), np.int32)
        tokens, places = [], []
        for n, length in enumerate(self.lengths):
            for t in range(self.base[n] * p.page_size, length):
                column = t // p.page_size - self.base[n]
                table[n, column] = pages[n, column]
                tokens.append((n, t))
                places.append((pages[n, column], t % p.page_size))
        at = np.array(places, np.int64).reshape(-1, 2).T
        values, pools, scales = [], [], []
        for format, junk in ((p.k_format, np.nan), (p.v_format, junk_in_v)):
            pool_, scales_ = p.pool(format, p.N * p.P + 1)
            dense = np.zeros((p.N, last, p.K, p.D))
            if format in TOPS:
                pool = rng.integers(0, 256, size=pool_.shape, dtype=np.uint8).view(pool_.dtype)
                scale = np.full(scales_.shape, np.nan, np.float32)
                codes = rng.integers(-TOPS[format], TOPS[format] + 1, size=(len(tokens), p.K, p.D))
                scale_ = (rng.uniform(0.5, 2, size=codes.shape[:2]) / TOPS[format]).astype(np.float32)
                scale[at[0], :, at[1]] = scale_
                pool[at[0], :, at[1]] = pack(codes) if format == "int4" else codes
                rows = codes * scale_.astype(np.float64)[..., None]
            else:
                pool, scale = np.full(pool_.shape, junk).astype(q.dtype), None
                rows = rng.normal(size=(len(tokens), p.K, p.D)).astype(q.dtype)
                rows = np.abs(rows) if self.below else rows
                pool[at[0], :, at[1]] = rows
                pool = pool.view(pool_.dtype)
            for token, row in zip(tokens, rows, strict=True):
                dense[token] = row
            values.append(dense)
            pools.append(pool)
            scales.append(scale)
        sinks = rng.normal(size=(p.K, p.G)).astype(np.float32) if p.sinks else None
        arrays = (q, *pools, table, self.base, self.positions, *scales, sinks)
        return [None if a is None else jnp.asarray(a) for a in arrays], self.right(q, *values, sinks)

    def right(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
        """Of q [N, Q, K, G, D] and values k, v f64[N, T, K, D]."""
        p, out = self.problem, np.zeros(q.shape)
        for n, i, h in np.ndindex(q.shape[:3]):
            sinks_G = None if sinks is None else sinks[h]
            options = {"scale": p.scale, "window": p.window, "softcap": p.softcap, "sinks_G": sinks_G}
            out[n, i, h] = attend(q[n, i, h], k[n, :, h], v[n, :, h], self.positions[n, i], **options)
        return out


def pack(codes: np.ndarray) -> np.ndarray:
    low, high = np.split((codes + 8).astype(np.uint8), 2, axis=-1)
    return low + 16 * high


def decode(problem: Problem, lengths: list[int], seed: int = 0, below: bool = False) -> Batch:
    """The last queries of each row, as many as there are; those before are masked."""
    positions = np.array(lengths)[:, None] - np.arange(problem.Q, 0, -1)
    positions = np.maximum(positions, -1).astype(np.int32)
    return Batch(problem, lengths, positions, np.zeros(problem.N, np.int32), seed, below)


@st.composite
def batches(draw: st.DrawFn, problem: Problem) -> Batch:
    """Rows of any length up to the table's, some of them masked; queries are the last ones written or some of these."""
    p = problem
    lengths, positions = [], np.full((p.N, p.Q), -1, np.int32)
    base = np.zeros(p.N, np.int32)
    for n in range(p.N):
        live = draw(st.integers(0, p.Q))
        if p.window is not None:
            base[n] = draw(st.integers(0, 3))  # pages behind the window were given back
        start = 0
        if p.window is not None and base[n]:
            start = int(base[n]) * p.page_size + p.window - 1
        end = (int(base[n]) + p.P) * p.page_size
        if start + live > end:
            live = 0
        length = draw(st.integers(start + live, end)) if live else 0
        positions[n, :live] = np.arange(length - live, length)
        hidden = draw(st.integers(0, 2**p.Q - 1))
        positions[n, (hidden >> np.arange(p.Q) & 1) == 1] = -1
        lengths.append(length)
    return Batch(p, lengths, positions, base, draw(st.integers(0, 2**32 - 1)))
