"""Paged attention against dense float64 attention: odd sizes, page borders, shared heads, windows, soft-caps.

Pages are handed out in random order and everything that was never written is NaN, as a failed request may leave it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.target import CPU
from tests.kernels.paged_attention.oracle import attend

ATTEND = jax.jit(paged_attention, static_argnames=("scale", "window", "softcap", "target"))


@dataclasses.dataclass(frozen=True)
class Case:
    """Static sizes: one compiled program each. ``width``: columns of the page table."""

    rows: int
    queries: int
    kv_heads: int
    q_per_kv: int
    head_dim: int
    page_size: int
    width: int
    window: int | None = None
    softcap: float | None = None
    dtype: str = "float32"

    @property
    def places(self) -> int:
        return self.page_size * self.width


CASES = {
    "decode": Case(3, 1, 2, 1, 8, 4, 7),
    "chunk, 3 heads share": Case(2, 5, 1, 3, 10, 8, 3, softcap=2.0),
    "chunk, window, 8 heads share": Case(1, 9, 2, 8, 16, 2, 9, window=3),
    "pages of one token": Case(2, 6, 2, 1, 8, 1, 13, window=5, softcap=1.5),
    "window of one": Case(2, 3, 1, 1, 8, 4, 4, window=1),
    "many rows, many key blocks": Case(16, 1, 1, 3, 8, 16, 23),
    "many key blocks behind a window": Case(16, 1, 1, 2, 8, 16, 23, window=150),
    "long context": Case(2, 1, 1, 2, 8, 64, 21),
    "bfloat16 as bits": Case(4, 1, 3, 3, 64, 16, 5, dtype="bfloat16"),
    "bfloat16 as bits, chunk, window": Case(2, 7, 2, 1, 24, 8, 6, window=11, dtype="bfloat16"),
}


@dataclasses.dataclass
class Batch:
    """One call's inputs and what must come out."""

    case: Case
    lengths: list[int]  # tokens written, per row
    positions: np.ndarray  # i32[N, Q]
    base: np.ndarray  # i32[N]
    seed: int

    def outputs(self, scale: float = 0.4) -> tuple[np.ndarray, np.ndarray, float]:
        """Ours, the oracle's (both f64[N, Q, K, G, D]) and the largest absolute value attended to."""
        c, rng = self.case, np.random.default_rng(self.seed)
        kind = np.float32 if c.dtype == "float32" else ml_dtypes.bfloat16
        last = max(self.lengths) + self.base.max() * c.page_size
        q = rng.normal(size=(c.rows, c.queries, c.kv_heads, c.q_per_kv, c.head_dim)).astype(kind)
        k, v = (rng.normal(size=(c.rows, last, c.kv_heads, c.head_dim)).astype(kind) for _ in range(2))
        num_pages = c.rows * c.width + 1
        pages = rng.permutation(np.arange(1, num_pages)).reshape(c.rows, c.width)
        # Places that were not written: whatever in K, as a failed request may leave it, and finite junk in V.
        k_pool, v_pool = (
            np.full((num_pages, c.kv_heads, c.page_size, c.head_dim), junk).astype(kind) for junk in (np.nan, 99.0)
        )
        table = np.zeros((c.rows, c.width), np.int32)
        for n, length in enumerate(self.lengths):
            for t in range(self.base[n] * c.page_size, length):
                column = t // c.page_size - self.base[n]
                table[n, column] = page = pages[n, column]
                k_pool[page, :, t % c.page_size] = k[n, t]
                v_pool[page, :, t % c.page_size] = v[n, t]
        if c.dtype == "bfloat16":
            k_pool, v_pool = k_pool.view(np.uint16), v_pool.view(np.uint16)
        ours = ATTEND(
            jnp.asarray(q),
            jnp.asarray(k_pool),
            jnp.asarray(v_pool),
            jnp.asarray(table),
            jnp.asarray(self.base),
            jnp.asarray(self.positions),
            scale=scale,
            window=c.window,
            softcap=c.softcap,
            target=CPU,
        )
        assert ours.dtype == kind
        options = {"scale": scale, "window": c.window, "softcap": c.softcap}
        right = np.array(
            [
                [
                    [attend(q[n, i, h], k[n, :, h], v[n, :, h], p, **options) for h in range(c.kv_heads)]
                    for i, p in enumerate(self.positions[n])
                ]
                for n in range(c.rows)
            ]
        )
        return np.asarray(ours, np.float64), right, float(np.abs(v.astype(np.float64)).max(initial=0))

    def check(self) -> None:
        ours, right, largest = self.outputs()
        # bfloat16: weights and the result are each rounded to 8 bits.
        tolerance = 2e-6 * largest * 8 if self.case.dtype == "float32" else 2**-7 * largest
        np.testing.assert_allclose(ours, right, rtol=0, atol=tolerance)
        np.testing.assert_array_equal(ours[self.positions < 0], 0)


@st.composite
def batches(draw: st.DrawFn, case: Case) -> Batch:
    """Rows of any length up to the table's, some of them masked; queries are the last ones written."""
    lengths, positions = [], np.full((case.rows, case.queries), -1, np.int32)
    base = np.zeros(case.rows, np.int32)
    for n in range(case.rows):
        live = draw(st.integers(0, case.queries))
        if case.window is not None:
            base[n] = draw(st.integers(0, 3))  # pages behind the window were given back
        start = 0
        if case.window is not None and base[n]:
            start = int(base[n]) * case.page_size + case.window - 1
        end = int(base[n]) * case.page_size + case.places
        if start + live > end:
            live = 0
        length = draw(st.integers(start + live, end)) if live else 0
        positions[n, :live] = np.arange(length - live, length)
        lengths.append(length)
    return Batch(case, lengths, positions, base, draw(st.integers(0, 2**32 - 1)))


@pytest.mark.parametrize("name", CASES)
def test_equals_dense_attention(name):
    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(batches(CASES[name]))
    def check(batch):
        batch.check()

    check()


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("name", ["decode", "many rows, many key blocks", "long context"])
def test_page_and_block_borders(name, offset):
    """Every row ends one before, on and one after each border, beside rows that end elsewhere."""
    case = CASES[name]
    ends = [p * case.page_size + offset for p in range(1, case.width + 1)]
    ends = [e for e in ends if 1 <= e <= case.places]
    for i in range(0, len(ends), case.rows):
        lengths = (ends[i : i + case.rows] * case.rows)[: case.rows]
        positions = np.array([[n - 1] for n in lengths], np.int32)
        Batch(case, lengths, positions, np.zeros(case.rows, np.int32), seed=i).check()


def test_a_batch_of_masked_rows_is_zero():
    case = CASES["decode"]
    masked = np.full((case.rows, 1), -1, np.int32)
    ours, _, _ = Batch(case, [0] * case.rows, masked, np.zeros(case.rows, np.int32), seed=0).outputs()
    np.testing.assert_array_equal(ours, 0)


def test_scores_far_apart_neither_overflow_nor_vanish():
    """Scores of about +-1e4: the best key takes all, wherever its block lies."""
    case = CASES["many rows, many key blocks"]
    positions = np.full((case.rows, 1), case.places - 1, np.int32)
    batch = Batch(case, [case.places] * case.rows, positions, np.zeros(case.rows, np.int32), seed=3)
    ours, right, largest = batch.outputs(scale=4e3)
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(ours, right, rtol=0, atol=1e-3 * largest)


def test_what_does_not_fit_is_refused():
    q = jnp.zeros((1, 1, 2, 1, 8))
    pages = jnp.zeros((3, 2, 4, 8))
    rows = jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="does not fit q"):
        paged_attention(q, pages[:, :1], pages[:, :1], *rows, scale=1.0, target=CPU)
    with pytest.raises(ValueError, match="does not fit q"):
        paged_attention(q, pages[..., :4], pages[..., :4], *rows, scale=1.0, target=CPU)
    with pytest.raises(ValueError, match="window must be >= 1, got 0"):
        paged_attention(q, pages, pages, *rows, scale=1.0, window=0, target=CPU)
