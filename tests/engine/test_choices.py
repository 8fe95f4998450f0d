"""Random choices through the compiled steps equal the documented rule, token by token, whoever is beside them."""

from __future__ import annotations

import pytest

from jaxsqueeze.types import SamplingParams
from tests.engine.traffic import Desk, random_ids, request

PROMPT = random_ids(41, 18)
SETTINGS = {
    "plain": {},
    "filters": {"temperature": 0.9, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.4, "temperature": 0.6},
    "attraction": {"repetition_penalty": 0.8, "frequency_penalty": -1.0, "temperature": 1.2, "top_k": 40},
    "bias": {"logit_bias": ((5, 4.0), (6, 4.5), (9, -100.0)), "temperature": 1.1},
    "bad words": {"bad_words_ids": ((5,), (6, 8)), "logit_bias": ((5, 9.0), (6, 6.0), (8, 6.0))},
    "late end": {"min_tokens": 12, "logit_bias": ((2, 5.0),), "top_p": 0.95},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_follows_the_rule(answer, oracle, name):
    """Preemption in the mixed run must keep counts, positions and the newest words."""
    options = {"max_tokens": 30, "ignore_eos": name != "late end", **SETTINGS[name]}
    wanted = [request(PROMPT, seed=seed, **options) for seed in (42, 2**64 - 1)]
    for r, a in zip(wanted, answer(*wanted), strict=True):
        assert a.reason in ("length", "stop")
        assert oracle.answer(PROMPT, a.tokens, r.sampling) == a.tokens


@pytest.mark.parametrize("off", [-1, 0, 259, 10**9])
def test_a_top_k_that_is_off_changes_nothing(answer, off):
    plain, off_ = answer(
        request(PROMPT, seed=1, max_tokens=15, ignore_eos=True),
        request(PROMPT, seed=1, max_tokens=15, top_k=off, ignore_eos=True),
    )
    assert off_.tokens == plain.tokens


def test_unseeded_requests_differ_and_do_not_disturb_seeded_ones(engine):
    options = {"max_tokens": 12, "temperature": 1.5, "ignore_eos": True}
    seen, unseeded = set(), set()
    for slot in range(4):
        desk = Desk(engine)
        for i in range(4):
            desk.add(request(PROMPT, id=f"{i}", seed=42 if i == slot else None, **options))
        desk.finish()
        tokens = [tuple(desk.answers[f"{i}"].tokens) for i in range(4)]
        seen.add(tokens.pop(slot))
        unseeded.update(tokens)
    assert len(seen) == 1
    assert len(unseeded) == 12


def test_three_choices_differ_and_repeat(llm):
    params = SamplingParams(n=3, seed=1, max_tokens=25, temperature=1.2)
    first, again = llm.generate([list(PROMPT), list(PROMPT)], params)
    alone = llm.generate(list(PROMPT), params)[0]
    assert [c.index for c in first.choices] == [0, 1, 2]
    assert len({c.token_ids for c in first.choices}) == 3
    assert first.choices == again.choices == alone.choices
    assert all(c.finish_reason in ("stop", "length") for c in first.choices)
    single = llm.generate(list(PROMPT), SamplingParams(seed=1, max_tokens=25, temperature=1.2))[0]
    assert single.choices[0] == first.choices[0]


def test_unseeded_choices_differ(llm):
    (g,) = llm.generate(list(PROMPT), SamplingParams(n=4, max_tokens=10, temperature=1.5, ignore_eos=True))
    assert len({c.token_ids for c in g.choices}) == 4


@pytest.mark.parametrize(
    "bad",
    [
        {"top_p": -1},
        {"top_p": 0},
        {"top_p": float("nan")},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1},
        {"repetition_penalty": 1e-40},
        {"temperature": -0.1},
        {"temperature": float("inf")},
        {"min_p": 1.5},
        {"top_k": -2},
        {"frequency_penalty": 2.5},
        {"logit_bias": ((3, float("inf")),)},
        {"logit_bias": ((3, 1e39),)},
        {"seed": 2**64},
        {"n": 0},
        {"logprobs": 21},
        {"max_tokens": -1},
        {"min_tokens": 3, "max_tokens": 2},
        {"bad_words_ids": ((),)},
        {"stop": ("",)},
    ],
    ids=str,
)
def test_absurd_values_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)
