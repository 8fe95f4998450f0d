"""top_k, top_p and min_p against their definitions in float64, over sorted probabilities."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxsqueeze.runner.sampling import filtered

FILTER = jax.jit(filtered)
ROWS, V = 4, 23


def kept(logits: np.ndarray, top_k: int, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """Tokens left of one row, with rows of other settings around it that must not matter."""
    x = np.full((ROWS, V), -np.inf, np.float32)
    x[0], x[1, : len(logits)], x[2, 5], x[3] = np.linspace(-3, 3, V), logits, 1.0, 0.25
    ks, ps, ms = np.array([V, top_k, 1, 7]), np.array([1, top_p, 0.2, 0.5]), np.array([0, min_p, 0.9, 0])
    out = np.asarray(FILTER(x, ks.astype(np.int32), ps.astype(np.float32), ms.astype(np.float32)))
    assert np.isfinite(out[0]).all()
    assert np.isfinite(out[2]).sum() == 1
    assert np.isfinite(out[3]).all()  # equal to the last one kept
    left = np.isfinite(out[1])
    np.testing.assert_array_equal(out[1][left], x[1][left])
    return set(np.flatnonzero(left).tolist())


def by_definition(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The order of transformers: top_k, top_p over what is left, min_p. Equal tokens share their fate."""
    x = logits.astype(np.float64)
    p = np.exp(x - x.max())
    p[x < np.sort(x)[::-1][min(top_k, len(x)) - 1]] = 0
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.concatenate([[0], np.cumsum(p[order])[:-1]])  # mass of all better tokens
        assume(np.abs(np.cumsum(p[order]) - top_p).min() > 1e-5)  # on the border rounding decides
        last = order[np.flatnonzero(before < top_p)[-1]]
        p[x < x[last]] = 0
    ratio = p / p.max()
    assume(min_p == 0 or np.abs(ratio - min_p).min() > 1e-5)
    return set(np.flatnonzero((p > 0) & (ratio >= min_p)).tolist())


P = np.log([0.4, 0.3, 0.2, 0.1])


def test_top_p_is_of_what_top_k_left():
    assert kept(P, 2, 0.5) == {0}
    assert kept(P, V, 0.5) == {0, 1}
    assert kept(P, 2, 0.58) == {0, 1}


@pytest.mark.parametrize(
    ("top_p", "right"), [(0.39, {0}), (0.41, {0, 1}), (0.69, {0, 1}), (0.71, {0, 1, 2}), (0.95, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_token_that_crosses_it(top_p, right):
    assert kept(P, V, top_p) == right


@pytest.mark.parametrize(("min_p", "right"), [(0.2, {0, 1, 2, 3}), (0.26, {0, 1, 2}), (0.74, {0, 1}), (0.76, {0})])
def test_min_p_is_relative_to_the_best(min_p, right):
    assert kept(P, V, min_p=min_p) == right


@pytest.mark.parametrize("top_k", range(1, 6))
def test_top_k(top_k):
    assert kept(P, top_k) == set(range(min(top_k, 4)))


@pytest.mark.parametrize(("top_p", "min_p"), [(1e-30, 0.0), (1e-50, 0.0), (1.0, 1.0), (1e-30, 1.0)])
def test_never_empty(top_p, min_p):
    assert kept(P, V, top_p, min_p) == {0}
    assert kept(np.array([-np.inf, -1e30, -2e30]), 1, top_p, min_p) == {1}


def test_equal_tokens_share_their_fate():
    assert kept(np.zeros(9), 1) == set(range(9))
    assert kept(np.array([2.0, 1.0, 1.0, 0.0]), 2) == {0, 1, 2}


def test_masked_tokens_stay_masked():
    logits = np.array([-np.inf, 1.0, -np.inf, 0.5])
    assert kept(logits, V) == {1, 3}
    assert kept(logits, 3, 0.999, 0.001) == {1, 3}


logits_of = st.lists(
    st.one_of(st.floats(-8, 8, width=32), st.sampled_from([0.0, -0.0, 1.0, -1.5, -30.0, -87.5])), min_size=V, max_size=V
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    logits=logits_of,
    top_k=st.integers(1, V),
    top_p=st.one_of(st.just(1.0), st.floats(0.015625, 0.984375, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(0.015625, 1, width=32)),
)
def test_equals_the_definition(logits, top_k, top_p, min_p):
    x = np.array(logits, np.float32) + np.float32(0)  # no negative zeros
    assert kept(x, top_k, top_p, min_p) == by_definition(x, top_k, top_p, min_p)
