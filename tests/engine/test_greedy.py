"""Greedy answers equal the dense float64 model's, alone and among others, at every border of pages and chunks."""

from __future__ import annotations

import pytest

from tests.engine.conftest import HF
from tests.engine.traffic import Desk, among_others, random_ids, request

LENGTHS = (1, 2, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100)


def test_prompts_of_every_awkward_length(answer, oracle):
    prompts = [random_ids(length, length) for length in LENGTHS]
    answers = answer(*(request(p, temperature=0, max_tokens=7, ignore_eos=True) for p in prompts))
    for prompt, a in zip(prompts, answers, strict=True):
        assert len(a.tokens) == 7
        assert oracle.answer(prompt, a.tokens, request(prompt, temperature=0).sampling) == a.tokens


def test_a_long_answer_crosses_many_pages(answer, oracle):
    prompt = random_ids(0, 5)
    (a,) = answer(request(prompt, temperature=0, ignore_eos=True))
    assert len(a.tokens) == 123
    assert a.reason == "length"
    assert oracle.answer(prompt, a.tokens, request(prompt, temperature=0).sampling) == a.tokens


def test_the_rush_takes_pages_from_a_request_that_has_begun(engine):
    """What the mixed runs rely on."""
    before = engine.stats().preemptions
    (a,) = among_others(engine, [request(random_ids(0, 30), temperature=0, max_tokens=40, ignore_eos=True)])
    assert engine.stats().preemptions > before
    assert len(a.tokens) == 40


class TestWindows:
    @pytest.mark.parametrize("position", [0, 20])
    def test_a_full_layer_sees_what_the_windowed_one_cannot(self, answer, oracle, position):
        """Prompts that differ far behind every window: only the full layer can tell them apart."""
        prompts = [list(random_ids(8, 60)) for _ in range(2)]
        prompts[1][position] = 100 if prompts[1][position] != 100 else 101
        assert len(prompts[0]) - position > HF["num_hidden_layers"] * HF["sliding_window"]
        answers = answer(*(request(p, temperature=0, max_tokens=5, logprobs=0, ignore_eos=True) for p in prompts))
        for prompt, a in zip(prompts, answers, strict=True):
            right = oracle.log_softmax([*prompt, *a.tokens])[len(prompt) - 1 : -1].max(-1)
            assert [x.logprob for x in a.logprobs] == pytest.approx(right, abs=2e-5)
        assert abs(answers[0].logprobs[0].logprob - answers[1].logprobs[0].logprob) > 1e-3

    def test_pages_behind_the_window_are_given_back(self, engine):
        desk = Desk(engine)
        desk.add(request(random_ids(0, 64), temperature=0, max_tokens=60, ignore_eos=True))
        most = 0
        desk.run(until=lambda: engine.stats().live_tokens[0] > 70)
        while engine.stats().running:
            most = max(most, engine.stats().pages_used[1])
            desk.step()
        # 4 tokens before the query and up to 3 new ones lie in at most two pages of 8.
        assert 1 <= most <= 2
        desk.finish()
