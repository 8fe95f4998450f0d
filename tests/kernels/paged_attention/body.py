"""What every implementation of paged_attention has to do. Subclass and give ``attend``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels.paged_attention.problem import Problem
from tests.kernels.paged_attention.build import Batch, batches, decode
from tests.kernels.properties import PROPERTY

# ||out - right|| / ||right||: f32 throughout; weights and result rounded to 11 or 8 bits.
BOUNDS = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 6e-3}


def problem(N, Q, K, G, D, page_size, P, dtype="float32", k="same", v="same", **options) -> Problem:
    return Problem(N, Q, K, G, D, page_size, P, dtype, k, v, **{"scale": 0.4, **options})


CASES = {
    "decode": problem(3, 1, 2, 2, 8, 4, 7, sinks=True),
    "verify, 3 heads share": problem(2, 5, 1, 3, 10, 8, 3, softcap=2.0, sinks=True),
    "chunk, window, 8 heads share": problem(1, 5, 1, 8, 16, 2, 9, window=3, v="int8"),
    "pages of one token": problem(2, 4, 2, 1, 8, 1, 13, window=5, softcap=1.5, sinks=True),
    "many key blocks": problem(4, 1, 1, 3, 8, 16, 17),
    "many key blocks behind a window": problem(4, 1, 1, 2, 8, 16, 17, window=70, k="int8"),
    "pages longer than blocks": problem(2, 1, 1, 2, 8, 64, 5, k="int4", v="int4"),
    "bfloat16": problem(2, 1, 3, 3, 64, 16, 5, "bfloat16"),
    "bfloat16, chunk, window": problem(2, 5, 2, 1, 24, 8, 6, "bfloat16", window=11, sinks=True),
}
FORMATS = [
    ("float32", "same", "same"),
    ("float32", "int8", "int4"),
    ("float32", "int4", "int8"),
    ("bfloat16", "same", "same"),
    ("bfloat16", "int8", "int8"),
    ("bfloat16", "int4", "same"),
    ("bfloat16", "same", "int4"),
    ("float16", "same", "same"),
    ("float16", "int8", "int4"),
]


class PagedAttentionBody:
    junk_in_v = np.nan  # V where nothing was written
    same = "same"  # how bfloat16 values are kept

    def attend(self, problem: Problem, *arrays: jax.Array | None) -> jax.Array:
        raise NotImplementedError

    def check(self, batch: Batch) -> np.ndarray:
        p = batch.problem
        if p.dtype == "bfloat16":
            k, v = (self.same if format == "same" else format for format in (p.k_format, p.v_format))
            batch = dataclasses.replace(batch, problem=dataclasses.replace(p, k_format=k, v_format=v))
        arrays, right = batch.arrays(self.junk_in_v)
        out = self.attend(batch.problem, *arrays)
        assert out.dtype == p.dtype
        assert out.shape == right.shape
        out = np.asarray(out, np.float64)
        np.testing.assert_array_equal(out[batch.positions < 0], 0)
        assert np.linalg.norm(out - right) <= BOUNDS[p.dtype] * np.linalg.norm(right)
        return out

    @pytest.mark.parametrize("name", CASES)
    def test_ragged_rows(self, name):
        @settings(PROPERTY, max_examples=4)
        @given(batches(CASES[name]))
        def check(batch):
            self.check(batch)

        check()

    @pytest.mark.parametrize(("dtype", "k", "v"), FORMATS)
    def test_formats(self, dtype, k, v):
        """A decode row beside a verify row, K and V apart."""
        self.check(decode(problem(2, 3, 2, 3, 32, 8, 6, dtype, k, v, scale=32**-0.5), [41, 17]))

    @pytest.mark.parametrize(
        ("D", "k", "v"),
        [
            (64, "same", "int8"),
            (80, "same", "int4"),
            (96, "int4", "same"),
            (128, "int8", "int4"),
            (256, "int4", "same"),
        ],
    )
    def test_head_sizes(self, D, k, v):
        self.check(decode(problem(1, 1, 1, 8, D, 16, 4, "bfloat16", k, v, scale=D**-0.5), [35]))

    @pytest.mark.parametrize("offset", [-1, 0, 1])
    def test_page_and_block_borders(self, offset):
        """Every row ends one before, on and one after a border, beside rows that end elsewhere."""
        case = problem(8, 1, 1, 2, 8, 16, 8, sinks=True)
        ends = [page * 16 + offset for page in range(8)]
        self.check(decode(case, [max(0, end) for end in ends]))

    @pytest.mark.parametrize("sinks", [False, True])
    def test_masked_rows_are_zero(self, sinks):
        case = problem(3, 1, 2, 1, 8, 4, 7, sinks=sinks)
        assert not self.check(decode(case, [0, 0, 0])).any()

    @pytest.mark.parametrize("case", [problem(0, 1, 2, 1, 8, 4, 7), problem(3, 0, 2, 1, 8, 4, 7)])
    def test_nothing_to_do(self, case):
        self.check(decode(case, [0] * case.N))

    def test_scores_far_apart_neither_overflow_nor_vanish(self):
        """Scores of about +-1e4: the best key takes all, wherever its block lies."""
        batch = decode(problem(4, 1, 1, 3, 8, 16, 16, scale=4e3), [256, 130, 70, 1], seed=3)
        arrays, right = batch.arrays(self.junk_in_v)
        np.testing.assert_allclose(self.attend(batch.problem, *arrays), right, rtol=0, atol=1e-3 * np.abs(right).max())

    def test_scores_below_zero(self):
        """The keys of every split sum to less than 1."""
        self.check(decode(problem(2, 1, 1, 3, 8, 16, 16, scale=8.0), [250, 40], below=True))

    def test_nan_of_a_failed_request_stays_in_its_row(self):
        """Its keys are NaN: its result says so, its neighbour's does not."""
        batch = decode(problem(2, 2, 1, 1, 8, 4, 7), [20, 20])
        arrays, right = batch.arrays(self.junk_in_v)
        k_pages = np.array(arrays[1])
        k_pages[np.asarray(arrays[3])[0, 2]] = np.nan
        arrays[1] = jnp.asarray(k_pages)
        out = np.asarray(self.attend(batch.problem, *arrays))
        assert np.isnan(out[0]).all()
        np.testing.assert_allclose(out[1], right[1], atol=1e-5)

    def one_hot(self, positions: list[int], q: float = 0.0, **options) -> np.ndarray:
        """f32[Q, 6]: six tokens in pages of two, out of order, equal keys, one-hot values: the weights themselves."""
        case = problem(1, len(positions), 1, 1, 6, 2, 3, scale=1.0, **options)
        k, v = np.full((5, 1, 2, 6), np.nan, np.float32), np.full((5, 1, 2, 6), self.junk_in_v, np.float32)
        for t in range(6):
            page = (3, 1, 4)[t // 2]
            k[page, 0, t % 2], v[page, 0, t % 2] = np.ones(6), np.eye(6)[t]
        arrays = np.full((1, len(positions), 1, 1, 6), q, np.float32), k, v, np.array([[3, 1, 4]], np.int32)
        rows = np.zeros(1, np.int32), np.array([positions], np.int32)
        sinks = jnp.zeros((1, 1)) if case.sinks else None
        return np.asarray(self.attend(case, *map(jnp.asarray, (*arrays, *rows)), None, None, sinks))[0, :, 0, 0]

    def test_window_of_four_over_six_tokens(self):
        weights = self.one_hot([0, 1, 2, 3, 4, 5], window=4)
        seen = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]
        for row, keys in zip(weights, seen, strict=True):
            np.testing.assert_allclose(row, np.isin(np.arange(6), keys) / len(keys), rtol=1e-6)

    def test_a_sink_takes_its_share_once(self):
        """Two scores 0 and sink 0: a third each."""
        np.testing.assert_allclose(self.one_hot([1], sinks=True), [[1 / 3, 1 / 3, 0, 0, 0, 0]], rtol=1e-6)

    def test_scores_are_capped_after_scaling(self):
        """Score 60 capped at 30 is 30 tanh(2) = 28.921, against a sink of 0."""
        share = self.one_hot([0], q=10.0, sinks=True, softcap=30.0)[0, 0]
        assert share == pytest.approx(1 / (1 + np.exp(-28.921)), rel=1e-6)
        less = self.one_hot([0], q=0.1, sinks=True, softcap=0.5)[0, 0]
        assert less == pytest.approx(1 / (1 + np.exp(-0.5 * np.tanh(0.6 / 0.5))), rel=1e-6)
