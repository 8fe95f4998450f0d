"""What every implementation of sample_topk has to do. Subclass and give ``filter``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pallas_kernels.sample_topk.problem import Problem
from tests.kernels.properties import PROPERTY

OFF = 10**9
MARGIN = 1e-5  # f32 sums are good for this


@dataclasses.dataclass(frozen=True)
class Row:
    logits: np.ndarray
    top_k: int = OFF
    top_p: float = 1.0
    min_p: float = 0.0

    def by_definition(self) -> tuple[set[int], float]:
        """The words that stay, in float64 over sorted probabilities, and how far they are from a border: the order of
        transformers, top_k, then top_p of what is left, then min_p. Equal words share their fate."""
        x, margin = self.logits.astype(np.float64), np.inf
        p = np.exp(x - x.max())
        p[x < np.sort(x)[::-1][min(self.top_k, len(x)) - 1]] = 0
        p /= p.sum()
        if self.top_p < 1:
            order = np.argsort(-p, kind="stable")
            sums = np.cumsum(p[order])
            before = np.concatenate([[0], sums[:-1]])  # mass of all better words
            last = order[np.flatnonzero(before < np.float32(self.top_p))[-1]]
            p[x < x[last]] = 0
            margin = np.abs(sums - np.float32(self.top_p)).min()
        ratio = p / p.max()
        if self.min_p > 0:
            margin = min(margin, np.abs(ratio - np.float32(self.min_p))[ratio < 1].min(initial=np.inf))
        best = x == x.max()
        return set(np.flatnonzero((p > 0) & (ratio >= np.float32(self.min_p)) | best).tolist()), float(margin)


P = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
NAMED = [
    # top_p is of what top_k left.
    (Row(P, 2, 0.5), {0}),
    (Row(P, OFF, 0.5), {0, 1}),
    (Row(P, 2, 0.58), {0, 1}),
    # The word that crosses top_p stays.
    (Row(P, OFF, 0.39), {0}),
    (Row(P, OFF, 0.71), {0, 1, 2}),
    (Row(P, OFF, 0.95), {0, 1, 2, 3}),
    # min_p is relative to the best word.
    (Row(P, min_p=0.26), {0, 1, 2}),
    (Row(P, min_p=0.76), {0}),
    (Row(P, min_p=1.0), {0}),
    (Row(P, min_p=2.0), {0}),
    (Row(P, 3, 0.95, 0.6), {0, 1}),
    # The best word always stays.
    (Row(P, OFF, 1e-30), {0}),
    (Row(P, OFF, 1e-50, 1.0), {0}),
    (Row(np.array([-np.inf, -1e30, -2e30]), 1), {1}),
    # Words equal to the last one kept stay, -0.0 and 0.0 too.
    (Row(np.zeros(9), 1), set(range(9))),
    (Row(np.zeros(9), OFF, 0.01), set(range(9))),
    (Row(np.array([2.0, 1.0, 1.0, 0.0]), 2), {0, 1, 2}),
    (Row(np.array([-0.0, 0.0, -1.0]), 1), {0, 1}),
    (Row(np.array([-0.0, 0.0, -1.0]), OFF, 0.3), {0, 1}),
    # Masked words stay masked.
    (Row(np.array([-np.inf, 1.0, -np.inf, 0.5]), 3, 0.999, 0.001), {1, 3}),
    # No filter.
    (Row(P), {0, 1, 2, 3}),
]

logits_of = st.lists(
    st.one_of(st.floats(-8, 8, width=32), st.sampled_from([0.0, -0.0, 1.0, -1.5, -30.0, -87.5, -np.inf])),
    min_size=23,
    max_size=23,
)


class SampleTopkBody:
    def filter(self, problem: Problem, *arrays: jax.Array) -> jax.Array:
        raise NotImplementedError

    def run(self, x_BV: np.ndarray, rows: list[Row]) -> np.ndarray:
        top_k = [min(r.top_k, x_BV.shape[1]) for r in rows]
        filters = np.array(top_k, np.int32), *np.array([(r.top_p, r.min_p) for r in rows], np.float32).T
        return np.asarray(self.filter(Problem(*x_BV.shape), *map(jnp.asarray, (x_BV, *filters))))

    def kept(self, rows: list[Row]) -> list[set[int]]:
        """Words left of each row; shorter rows are filled up with -inf."""
        x = np.full((len(rows), max(len(r.logits) for r in rows)), -np.inf, np.float32)
        for i, r in enumerate(rows):
            x[i, : len(r.logits)] = r.logits
        out = self.run(x, rows)
        assert out.shape == x.shape
        assert out.dtype == np.float32
        left = out != -np.inf
        np.testing.assert_array_equal(out[left], x[left])
        return [set(np.flatnonzero(row).tolist()) for row in left]

    def check(self, rows: list[Row]) -> None:
        rights = [r.by_definition() for r in rows]
        assert min(margin for _, margin in rights) > MARGIN, "the test asks for what rounding decides"
        for row, ours, (right, _) in zip(rows, self.kept(rows), rights, strict=True):
            assert ours == right, f"top_k {row.top_k}, top_p {row.top_p}, min_p {row.min_p}"

    def test_named_cases(self):
        for (row, right), ours in zip(NAMED, self.kept([row for row, _ in NAMED]), strict=True):
            assert ours == right, f"{row} keeps {ours}"

    @PROPERTY
    @given(
        logits=logits_of,
        top_k=st.one_of(st.integers(1, 23), st.just(OFF)),
        top_p=st.one_of(st.just(1.0), st.floats(0.015625, 0.984375, width=32)),
        min_p=st.one_of(st.just(0.0), st.floats(0.015625, 1, width=32)),
    )
    def test_equals_the_definition(self, logits, top_k, top_p, min_p):
        x = np.array(logits, np.float32)
        assume(x.max() > -np.inf)
        row = Row(x, top_k, top_p, min_p)
        right, margin = row.by_definition()
        assume(margin > MARGIN)
        assert self.kept([row]) == [{word for word in right if x[word] > -np.inf}]

    @pytest.mark.parametrize("V", [1, 5, 1000])
    def test_vocabularies(self, V):
        rng = np.random.default_rng(V)
        x = rng.normal(size=(5, V)).astype(np.float32) * 3
        settings = [(20, 1.0, 0.0), (OFF, 0.9, 0.0), (300, 0.5, 0.0), (OFF, 1.0, 0.1), (15, 0.8, 0.05)]
        self.check([Row(row, *s) for row, s in zip(x, settings, strict=True)])

    def test_flat_rows(self):
        """Many words share the top, or all are nearly equal: a few of the best are not enough to decide."""
        rng = np.random.default_rng(0)
        equal, nearly = np.zeros(400, np.float32), (rng.normal(size=400) * 0.01).astype(np.float32)
        top = np.where(np.arange(400) % 3 == 0, 5, nearly).astype(np.float32)
        settings = [(equal, 3, 1.0), (equal, OFF, 0.503), (nearly, 3, 1.0), (nearly, OFF, 0.7), (nearly, 390, 0.9)]
        settings += [(top, 3, 1.0), (top, 200, 1.0), (top, OFF, 0.995), (top, 30, 0.4)]
        close = (100 - 0.001 * np.abs(np.arange(400) - 200)).astype(np.float32)  # the best are not the first
        settings += [(close, 3, 1.0), (close, OFF, 0.4)]
        self.check([Row(*setting) for setting in settings])

    @pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
    def test_broken_rows_end_and_disturb_nobody(self):
        """NaN, +inf or nothing finite: each value stays or becomes -inf, and the row below is right."""
        rng = np.random.default_rng(0)
        x = rng.normal(size=(4, 40)).astype(np.float32)
        x[0, 7], x[1, 5], x[2] = np.nan, np.inf, -np.inf
        rows = [Row(row, 5, 0.75, 0.01) for row in x]
        out = self.run(x, rows)
        same = (out.view(np.uint32) == x.view(np.uint32)) | (out == -np.inf)
        assert same.all()
        right, margin = rows[3].by_definition()
        assert margin > MARGIN
        assert set(np.flatnonzero(out[3] > -np.inf)) == right
