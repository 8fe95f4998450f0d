"""Filters of logits, each implementation against the definition over sorted float64 probabilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.launch import Launch
from pallas_kernels.sample_topk import reference
from pallas_kernels.sample_topk import triton as triton_kernel
from pallas_kernels.sample_topk.api import sample_topk
from pallas_kernels.sample_topk.problem import Problem
from pallas_kernels.target import CPU, H200
from tests.kernels.interpreter import interpret
from tests.kernels.sample_topk.body import OFF, Row, SampleTopkBody

REFERENCE = jax.jit(reference.run, static_argnums=0)


class TestReference(SampleTopkBody):
    def filter(self, problem, *arrays):
        return REFERENCE(problem, *arrays)


class TestTritonWholeRows(SampleTopkBody):
    """The default tiles of these small vocabularies."""

    def filter(self, problem, *arrays):
        return triton_kernel.run(problem, triton_kernel.tiles(problem, H200)[0], interpret, *arrays)


class TestTritonCandidates(SampleTopkBody):
    """Some rows fit the candidates, some do not."""

    def filter(self, problem, *arrays):
        size = 16 if problem.V < 100 else 128
        return triton_kernel.run(problem, {"chunk": 2 * size, "capacity": size, "warps": 1}, interpret, *arrays)


class TestLargeVocabulary:
    """The default tile on logits as a model gives them: a few words far above a bulk."""

    V = 33_001
    settings = ((50, 1.0, 0.0), (OFF, 0.9, 0.0), (20, 0.95, 0.02))

    def logits(self) -> np.ndarray:
        x = np.random.default_rng(0).normal(size=(3, self.V)).astype(np.float32) * 2
        x[:, np.random.default_rng(1).integers(0, self.V, 300)] += 12
        return x

    def run(self, launcher) -> tuple[np.ndarray, list[Row]]:
        x = self.logits()
        problem = Problem(*x.shape)
        rows = [Row(row, *s) for row, s in zip(x, self.settings, strict=True)]
        filters = np.array([min(r.top_k, self.V) for r in rows], np.int32), np.float32([r.top_p for r in rows])
        arrays = map(jnp.asarray, (x, *filters, np.float32([r.min_p for r in rows])))
        tile = triton_kernel.tiles(problem, H200)[0]
        return np.asarray(triton_kernel.run(problem, tile, launcher, *arrays)), rows

    def test_few_candidates_decide(self):
        """The third launch does not need the row: here it gets another one."""
        counts = []

        def launcher(launch: Launch, x, *inputs):
            last = launch.kernel is triton_kernel._thresholds
            outputs = interpret(launch, jnp.full_like(x, jnp.nan) if last else x, *inputs)
            if launch.kernel is triton_kernel._candidates:
                counts.append(outputs[1])
            return outputs

        out, rows = self.run(launcher)
        for ours, row in zip(out, rows, strict=True):
            right, margin = row.by_definition()
            assert margin > 1e-6
            assert set(np.flatnonzero(ours > -np.inf)) == right
        assert (np.sum(counts[0], axis=1) < 2048).all()
        assert (np.sum(counts[0], axis=1) >= 1024).all()


def test_a_row_without_filters_is_not_read():
    """Not a maximum of it is taken: the scratch memory of its row stays as it was."""
    seen = {}

    def launcher(launch: Launch, *inputs):
        seen[launch.kernel.__name__] = interpret(launch, *inputs)
        return seen[launch.kernel.__name__]

    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 40)), jnp.float32)
    filters = jnp.array([40, 3]), jnp.ones(2), jnp.zeros(2)
    out = triton_kernel.run(Problem(2, 40), {"chunk": 32, "capacity": 16, "warps": 1}, launcher, x, *filters)
    np.testing.assert_array_equal(out[0], x[0])
    assert np.isfinite(out[1]).sum() == 3
    (maxima,), (candidates, *_), (threshold,) = (seen[n] for n in ("_maxima", "_candidates", "_thresholds"))
    assert np.isnan(maxima[0]).all()
    assert np.isnan(candidates[0]).all()
    assert not np.isnan(maxima[1]).any()
    assert threshold[0] == -np.inf


def test_tiles():
    with pytest.raises(NotImplementedError, match="2\\^24"):
        triton_kernel.tiles(Problem(1, 2**24), H200)
    assert triton_kernel.tiles(Problem(1, 8192), H200)[0]["chunk"] == 0
    for problem in (Problem(1, 32_000), Problem(64, 152_064), Problem(8, 262_144)):
        assert triton_kernel.tiles(problem, H200)[0]["chunk"] >= 8192


def test_no_rows():
    empty = jnp.zeros((0, 7)), jnp.zeros(0, jnp.int32), jnp.zeros(0), jnp.zeros(0)
    assert sample_topk(*empty, target=CPU).shape == (0, 7)
    tile = triton_kernel.tiles(Problem(0, 7), H200)[0]
    assert triton_kernel.run(Problem(0, 7), tile, interpret, *empty).shape == (0, 7)


def test_what_does_not_fit_is_refused():
    x, k, p = jnp.zeros((2, 5)), jnp.ones(2, jnp.int32), jnp.ones(2)
    with pytest.raises(ValueError, match="need f32"):
        sample_topk(x.astype(jnp.bfloat16), k, p, p, target=CPU)
    with pytest.raises(ValueError, match="need f32"):
        sample_topk(x, k[:1], p, p, target=CPU)
    with pytest.raises(ValueError, match="need f32"):
        sample_topk(x, p, p, p, target=CPU)
