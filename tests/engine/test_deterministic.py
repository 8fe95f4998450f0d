"""``deterministic``: a request's tokens and log-probabilities are the same bits alone and under load, in float32 and
bfloat16, whichever slot and row it sits in and however long its neighbours' contexts are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.traffic import Answer, Desk, alone, random_ids, request

# Lengths of one row, of a chunk's last row beside another's, of several chunks, of several blocks of keys.
LENGTHS = (5, 32, 40, 64, 150, 330)
GREEDY = {"temperature": 0, "ignore_eos": True}
RANDOM = {"temperature": 1.1, "seed": 7, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3}


def target(length: int, **sampling: object):
    options = {"max_tokens": 14, "logprobs": 4, "prompt_logprobs": 2, "ignore_eos": True}
    return request(random_ids(300 + length, length), **{**options, **sampling})


def neighbours(first: int, count: int):
    """Long and short contexts, greedy and random."""
    for i in range(first, first + count):
        length = (400, 20, 130)[i % 3]
        options = {"max_tokens": 5 + 9 * i, "ignore_eos": True, "temperature": i % 2, "seed": i}
        yield request(random_ids(400 + i, length), **options)


def under_load(engine, wanted, slot: int, late: bool) -> Answer:
    """``slot`` others are there first. ``late``: they already decode when the request comes."""
    desk = Desk(engine)
    desk.add(*neighbours(slot, slot))
    if late:
        for _ in range(4 * slot):
            desk.step()
    desk.add(wanted)
    desk.step()
    desk.add(*neighbours(10 + slot, 5))
    desk.run(until=lambda: desk.answers[wanted.id].reason is not None)
    for id in desk.answers:
        desk.abort(id)
    desk.finish()
    return desk.answers[wanted.id]


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_same_bits_alone_and_under_load(deterministic, length, sampling):
    (right,) = alone(deterministic, [target(length, **sampling)])
    assert len(right.tokens) == 14
    assert len(right.prompt_logprobs) == length
    for slot, late in [(0, False), (1, True), (2, False), (3, True)]:
        assert under_load(deterministic, target(length, **sampling), slot, late) == right


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_the_answers_are_right(deterministic, oracle, sampling):
    """Exactly by the rules in float32; in bfloat16 each log-probability within what rounding to 8 bits explains."""
    wanted = target(150, **sampling)
    (a,) = alone(deterministic, [wanted])
    exact = deterministic.config.dtype == "float32"
    if exact:
        assert oracle.answer(wanted.prompt_ids, a.tokens, wanted.sampling) == a.tokens
    raw = oracle.log_softmax([*wanted.prompt_ids, *a.tokens])
    scores = [*a.prompt_logprobs[1:], *a.logprobs]
    right = [row[x.token_id] for row, x in zip(raw, scores, strict=False)]
    error = np.abs(np.array([x.logprob for x in scores]) - right)
    assert error.max() < (2e-5 if exact else 0.1)


def test_a_crowd_of_the_same_request(deterministic):
    """Twelve copies in four slots, chunks of two of them in one step."""
    (right,) = alone(deterministic, [target(32, **RANDOM)])
    desk = Desk(deterministic)
    copies = [target(32, **RANDOM) for _ in range(12)]
    desk.add(*copies)
    desk.finish()
    assert all(desk.answers[c.id] == right for c in copies)


def test_nobody_is_preempted(deterministic):
    before = deterministic.stats().preemptions
    desk = Desk(deterministic)
    desk.add(*(request(random_ids(500 + i, 300), max_tokens=90, priority=-i, **GREEDY) for i in range(6)))
    desk.finish()
    assert deterministic.stats().preemptions == before


def test_nothing_compiled(deterministic):
    """Compared with itself: other engines may have been compiled since."""
    compiled = deterministic.compiles_since_ready
    alone(deterministic, [target(150, **GREEDY), target(33, **RANDOM)])
    assert deterministic.compiles_since_ready == compiled
