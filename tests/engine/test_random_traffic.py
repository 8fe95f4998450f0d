"""Random requests that come, go, leave early and take each other's pages: every answer that ends is right by the
dense model and the documented rules, nothing compiles, nothing is lost."""

from __future__ import annotations

import random

import pytest

from tests.engine.test_logprobs import assert_scores
from tests.engine.traffic import Desk, random_ids, request


def random_request(rng: random.Random, number: int):
    def maybe(value: object, default: object, chance: float = 0.3) -> object:
        return value if rng.random() < chance else default

    longest = rng.choice([6, 30, 100])
    prompt = random_ids(1000 + number, rng.randint(1, longest))
    return request(
        prompt,
        id=f"t{number}",
        priority=rng.choice([0, 0, 0, -1, 2]),
        max_tokens=rng.choice([0, 1, 3, 12, 40, 90, None]),
        temperature=rng.choice([0, 0, 0.6, 1.0, 1.4]),
        seed=rng.randrange(2**64),
        top_k=maybe(rng.randint(1, 30), 0),
        top_p=maybe(rng.uniform(0.3, 1), 1.0),
        min_p=maybe(rng.uniform(0, 0.2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.8, 1.6), 1.0),
        frequency_penalty=maybe(rng.uniform(-1, 1), 0.0),
        presence_penalty=maybe(rng.uniform(-1, 1), 0.0),
        logit_bias=tuple((rng.randrange(259), rng.uniform(-5, 5)) for _ in range(maybe(5, 0))),
        bad_words_ids=tuple(random_ids(rng.randrange(99), rng.randint(1, 2)) for _ in range(maybe(3, 0))),
        stop_token_ids=tuple(rng.randrange(3, 259) for _ in range(maybe(4, 0))),
        logprobs=maybe(rng.randint(0, 20), None),
        prompt_logprobs=maybe(rng.randint(0, 20), None),
        ignore_eos=maybe(True, False),
    )


@pytest.mark.parametrize("seed", range(3))
def test_every_answer_is_right(engine, oracle, seed):
    rng = random.Random(seed)
    desk = Desk(engine)
    requests, left, number = {}, set(), 0
    preempted = engine.stats().preemptions
    while number < 50 or engine.has_work():
        while number < 50 and rng.random() < 0.35:
            r = random_request(rng, 100 * seed + number)
            requests[r.id] = r
            desk.add(r)
            number += 1
        if rng.random() < 0.04 and requests:
            leaver = rng.choice(list(requests))
            if desk.abort(leaver):
                left.add(leaver)
        desk.step()
    desk.finish()
    assert engine.stats().preemptions > preempted
    for name, r in requests.items():
        a, s = desk.answers[name], r.sampling
        assert oracle.answer(r.prompt_ids, a.tokens, s) == a.tokens, r
        if name in left:
            assert a.reason is None
            continue
        stops = {*s.stop_token_ids, *(() if s.ignore_eos else (2, 7))}
        ended = bool(a.tokens) and a.tokens[-1] in stops
        assert a.reason == ("stop" if ended else "length"), r
        assert not set(a.tokens[:-1]) & stops
        room = 128 - len(r.prompt_ids)
        assert ended or len(a.tokens) == (room if s.max_tokens is None else min(s.max_tokens, room))
        raw = oracle.log_softmax([*r.prompt_ids, *a.tokens])
        if s.logprobs is None:
            assert a.logprobs is None
        else:
            assert_scores(a.logprobs, raw[len(r.prompt_ids) - 1 : -1], a.tokens, s.logprobs)
        if s.prompt_logprobs is None:
            assert a.prompt_logprobs is None
        else:
            before = len(r.prompt_ids) - 1
            assert_scores(a.prompt_logprobs[1:], raw[:before], list(r.prompt_ids[1:]), s.prompt_logprobs)
