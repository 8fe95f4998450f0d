"""Log-probabilities through the compiled steps: the raw log-softmax of the dense model, whatever the request does to
its distribution and however its prompt is cut up."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.engine.traffic import alone, random_ids, request

PROMPT = random_ids(31, 33)
TOLERANCE = 2e-5
CHANGED = {
    "cold": {"temperature": 0.1, "top_p": 0.01, "seed": 3},
    "hot": {"temperature": 1.7, "seed": 4},
    "filtered": {"temperature": 1.0, "top_k": 4, "min_p": 0.05, "seed": 5},
    "penalised": {
        "temperature": 0,
        "repetition_penalty": 1.8,
        "frequency_penalty": 1.0,
        "presence_penalty": -1.0,
        "logit_bias": ((100, 3.0), (50, -100.0)),
        "bad_words_ids": ((20,), (30, 31)),
    },
}


def assert_scores(scores, raw_TV: np.ndarray, tokens: list[int], top: int) -> None:
    """``raw_TV[i]``: the distribution that ``tokens[i]`` came from."""
    assert [x.token_id for x in scores] == list(tokens)
    for x, raw, token in zip(scores, raw_TV, tokens, strict=True):
        assert x.logprob == pytest.approx(raw[token], abs=TOLERANCE)
        assert x.rank == 1 + (raw > raw[token]).sum()
        best = np.argsort(-raw)[:top]
        assert [i for i, _ in x.top] == best.tolist()
        assert [v for _, v in x.top] == pytest.approx(raw[best], abs=TOLERANCE)
        assert all(math.isfinite(v) for v in (x.logprob, *(v for _, v in x.top)))


@pytest.mark.parametrize("name", CHANGED)
def test_values_are_raw(answer, oracle, name):
    wanted = request(PROMPT, max_tokens=10, logprobs=5, ignore_eos=True, **CHANGED[name])
    (a,) = answer(wanted)
    assert len(a.tokens) == 10
    assert_scores(a.logprobs, oracle.log_softmax([*PROMPT, *a.tokens])[len(PROMPT) - 1 : -1], a.tokens, 5)
    assert oracle.answer(PROMPT, a.tokens, wanted.sampling) == a.tokens


def test_temperature_and_top_p_move_nothing(answer):
    plain, cold = answer(
        request(PROMPT, temperature=0, max_tokens=8, logprobs=2, ignore_eos=True),
        request(PROMPT, max_tokens=8, logprobs=2, ignore_eos=True, **CHANGED["cold"]),
    )
    assert cold.tokens == plain.tokens
    assert [x.logprob for x in cold.logprobs] == pytest.approx([x.logprob for x in plain.logprobs], abs=TOLERANCE)


@pytest.mark.parametrize("top", [0, 1, 20])
def test_as_many_alternatives_as_asked_for(answer, oracle, top):
    (a,) = answer(request(PROMPT, temperature=0, max_tokens=4, logprobs=top, ignore_eos=True))
    assert_scores(a.logprobs, oracle.log_softmax([*PROMPT, *a.tokens])[len(PROMPT) - 1 : -1], a.tokens, top)


def test_none_without_asking(answer):
    with_them, without = answer(
        request(PROMPT, temperature=0, max_tokens=5, logprobs=1), request(PROMPT, temperature=0, max_tokens=5)
    )
    assert len(with_them.logprobs) == 5
    assert without.logprobs is None
    assert without.prompt_logprobs is None


@pytest.mark.parametrize("length", [1, 2, 8, 9, 32, 33, 64, 65, 100])
def test_prompt_scores(answer, oracle, length):
    """Over chunks that end inside and on the borders of pages and rows."""
    prompt = random_ids(length, length)
    (a,) = answer(request(prompt, temperature=0, max_tokens=3, prompt_logprobs=2, ignore_eos=True))
    assert len(a.prompt_logprobs) == length
    assert a.prompt_logprobs[0] is None
    assert_scores(a.prompt_logprobs[1:], oracle.log_softmax(prompt)[:-1], prompt[1:], 2)


def test_prompt_scores_sent_twice(answer):
    """On an idle engine, and beside itself."""
    first, second = answer(*(request(PROMPT, temperature=0, max_tokens=2, prompt_logprobs=1) for _ in range(2)))
    ours, again = ([x.logprob for x in a.prompt_logprobs[1:]] for a in (first, second))
    assert len(ours) == 32
    assert ours == pytest.approx(again, abs=TOLERANCE)


def test_the_same_request_on_an_idle_engine_gives_the_same_bits(engine):
    wanted = [request(PROMPT, temperature=0, max_tokens=9, prompt_logprobs=3, logprobs=3) for _ in range(2)]
    first, second = alone(engine, wanted)
    assert first == second


def test_scoring_alone_generates_nothing(answer, oracle):
    (a,) = answer(request(PROMPT, max_tokens=0, prompt_logprobs=0, logprobs=0))
    assert (a.tokens, a.logprobs, a.reason) == ([], [], "length")
    assert_scores(a.prompt_logprobs[1:], oracle.log_softmax(PROMPT)[:-1], PROMPT[1:], 0)


def test_sum_of_generated_equals_their_score_as_a_prompt(answer):
    (a,) = answer(request(PROMPT, temperature=1, seed=8, max_tokens=20, logprobs=0, ignore_eos=True))
    (echo,) = answer(request([*PROMPT, *a.tokens], max_tokens=0, prompt_logprobs=0))
    scored = [x.logprob for x in echo.prompt_logprobs[len(PROMPT) :]]
    assert [x.logprob for x in a.logprobs] == pytest.approx(scored, abs=TOLERANCE)
    assert sum(scored) == pytest.approx(sum(x.logprob for x in a.logprobs), abs=1e-4)
