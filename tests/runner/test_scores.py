"""Log-probabilities: raw log-softmax in float64, whatever the request does to its logits."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxsqueeze.runner.sampling import score
from jaxsqueeze.types import MAX_LOGPROBS
from tests.runner.build_slots import ROWS, V, admitted, row, sampled

RNG = np.random.default_rng(2)
SCORE = jax.jit(score)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


def assert_right(logprobs, logits: np.ndarray, tokens: np.ndarray) -> None:
    raw = log_softmax(logits)
    rows = np.arange(len(tokens))
    np.testing.assert_allclose(logprobs.token, raw[rows, tokens], atol=1e-5)
    np.testing.assert_array_equal(logprobs.rank, 1 + (logits > logits[rows, tokens][:, None]).sum(1))
    order = np.argsort(-logits, axis=1, kind="stable")
    k = min(MAX_LOGPROBS, logits.shape[1])
    np.testing.assert_array_equal(logprobs.top_ids[:, :k], order[:, :k])
    np.testing.assert_allclose(logprobs.top[:, :k], np.take_along_axis(raw, order[:, :k], axis=1), atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_score(scale):
    logits = (scale * RNG.normal(size=(ROWS, V))).astype(np.float32)
    tokens = RNG.integers(0, V, ROWS).astype(np.int32)
    assert_right(jax.tree.map(np.asarray, SCORE(logits, tokens)), logits, tokens)


def test_a_vocabulary_smaller_than_the_alternatives():
    logits = RNG.normal(size=(2, 7)).astype(np.float32)
    out = jax.tree.map(np.asarray, SCORE(logits, np.array([0, 6], np.int32)))
    assert_right(out, logits, np.array([0, 6]))
    assert (out.top_ids[:, 7:] == -1).all()
    assert (out.top[:, 7:] == -np.inf).all()


def test_values_are_raw_whatever_changes_the_choice():
    settings = {
        "repetition_penalty": 2.0,
        "frequency_penalty": 1.0,
        "logit_bias": ((3, 5.0),),
        "bad_words_ids": ((4,),),
        "min_tokens": 5,
        "top_k": 3,
        "top_p": 0.5,
        "seed": 1,
    }
    logits = RNG.normal(size=(ROWS, V)).astype(np.float32)
    logits[:, 4], logits[:, 2] = 4.0, 5.0
    rows = {s: row(output=(3, 3), stop_ids=(2,), temperature=s % 3, logprobs=3, **settings) for s in range(ROWS)}
    tokens, logprobs = sampled(logits, admitted(rows), [3] * ROWS)
    assert not np.isin(tokens, [2, 4]).any()
    assert_right(logprobs, logits, tokens)


def test_equal_logits_rank_alike():
    logits = np.zeros((1, 5), np.float32)
    assert int(SCORE(logits, np.array([3], np.int32)).rank[0]) == 1
