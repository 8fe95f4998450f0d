"""What goes wrong on the device ends the requests it touched, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest

from jaxsqueeze.engine import Engine
from jaxsqueeze.runner.runner import Pending, Runner
from jaxsqueeze.types import SamplingParams
from tests.engine.traffic import Desk, alone, random_ids, request

GREEDY = {"temperature": 0, "ignore_eos": True}
POISON = 200  # a token id


def fails_once(engine: Engine, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int) -> list[int]:
    """The call number ``after`` of a method raises, and the buffers that steps donate are gone, as after a real
    failure. Returns a list that is empty until then."""
    real: Callable[..., object] = getattr(owner, name)
    calls, failed = [], []

    def call(*args: object) -> object:
        calls.append(1)
        if len(calls) == after + 1:
            failed.append(after)
            for buffer in jax.tree.leaves((engine._runner._pool, engine._runner._state)):
                buffer.delete()
            raise RuntimeError("the device has gone away")
        return real(*args)

    monkeypatch.setattr(owner, name, call)
    return failed


@pytest.mark.parametrize("after", range(7))
@pytest.mark.parametrize(("owner", "name"), [(Runner, "_call"), (Pending, "result")])
def test_a_failed_step(engine, oracle, monkeypatch, owner, name, after):
    """The runner refuses to dispatch, or the tokens never come: those in slots end with an error, those who wait go
    on and are right, and so is who comes later."""
    failed = fails_once(engine, monkeypatch, owner, name, after)
    desk = Desk(engine)
    requests = [request(random_ids(60 + i, 15 + 5 * i), max_tokens=9, **GREEDY) for i in range(7)]
    desk.add(*requests)
    desk.finish()
    assert failed
    answers = [desk.answers[r.id] for r in requests]
    lost = [a for a in answers if a.reason == "error"]
    assert 1 <= len(lost) <= 4
    assert all("device" in a.error and "gone away" not in a.error for a in lost)  # internals stay in the log
    for r, a in zip(requests, answers, strict=True):
        assert a.reason in ("error", "length")
        assert oracle.answer(r.prompt_ids, a.tokens, r.sampling) == a.tokens
        assert len(a.tokens) == 9 or a.reason == "error"
    assert answers[-1].reason == "length"  # it was waiting for a slot
    later = request(random_ids(70, 40), max_tokens=9, seed=5)
    (a,) = alone(engine, [later])
    assert oracle.answer(later.prompt_ids, a.tokens, later.sampling) == a.tokens


@pytest.mark.parametrize(("owner", "name"), [(Runner, "_call"), (Pending, "result")])
def test_failed_steps_are_counted_until_one_succeeds(engine, monkeypatch, owner, name):
    def fails(*_args: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        for count in range(1, 4):
            (answer,) = alone(engine, [request(random_ids(count, 9), max_tokens=3, **GREEDY)])
            assert (answer.reason, engine.failed_steps) == ("error", count)
    (answer,) = alone(engine, [request(random_ids(9, 9), max_tokens=3, **GREEDY)])
    assert (answer.reason, engine.failed_steps) == ("length", 0)


def test_the_step_before_a_failed_one_is_delivered(engine, oracle, monkeypatch):
    """It had succeeded: who ended there has an answer, not an error."""
    fails_once(engine, monkeypatch, Runner, "_call", 1)
    desk = Desk(engine)
    short, long = (request(random_ids(80 + n, 9), max_tokens=n, **GREEDY) for n in (1, 9))
    desk.add(short, long)
    desk.finish()
    ended, lost = desk.answers[short.id], desk.answers[long.id]
    assert ended.reason == "length"
    assert oracle.answer(short.prompt_ids, ended.tokens, short.sampling) == ended.tokens
    assert len(ended.tokens) == 1
    assert lost.reason == "error"
    assert len(lost.tokens) == 1


def test_offline_a_failed_step_is_an_error_of_its_choices(llm, monkeypatch):
    fails_once(llm.engine, monkeypatch, Runner, "_call", 3)
    generations = llm.generate([list(random_ids(i, 30)) for i in range(6)], SamplingParams(max_tokens=8, **GREEDY))
    reasons = [g.choices[0].finish_reason for g in generations]
    assert "error" in reasons
    assert reasons[-1] == "length"
    for g in generations:
        assert (g.choices[0].error is not None) == (g.choices[0].finish_reason == "error")


@pytest.fixture
def poisoned(engine) -> Iterator[None]:
    """Every sequence that holds the token POISON computes NaN."""
    variables = engine._runner._variables
    weight = np.array(variables["params"]["embed"]["weight"])
    weight[POISON] = np.nan
    broken = {**variables["params"], "embed": {"weight": jax.device_put(weight)}}
    engine._runner._variables = {**variables, "params": broken}
    yield
    engine._runner._variables = variables


def prompt_of(seed: int, length: int) -> list[int]:
    return [t if t != POISON else 10 for t in random_ids(seed, length)]


@pytest.mark.parametrize("place", [0, 10, 29])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_sequence_of_nan_ends_alone(poisoned, engine, oracle, place, temperature):
    """Its neighbours are right, and so are those who get its pages, NaN inside, afterwards."""
    bad = prompt_of(80, 30)
    bad[place] = POISON
    broken = request(bad, temperature=temperature, seed=1, max_tokens=9, logprobs=1)
    # POISON itself must not be chosen by the others.
    options = {"logit_bias": ((POISON, -1000.0),), "max_tokens": 12, "ignore_eos": True, "seed": 3}
    good = [request(prompt_of(81 + i, 20 + 7 * i), temperature=i % 2, **options) for i in range(3)]
    desk = Desk(engine)
    desk.add(good[0], broken, *good[1:])
    desk.finish()
    after = [request(prompt_of(90 + i, 60), temperature=0, **options) for i in range(2)]
    desk.add(*after)
    desk.finish()
    a = desk.answers[broken.id]
    assert (a.tokens, a.reason, a.error) == ([], "error", "the model's logits were not finite")
    for r in (*good, *after):
        a = desk.answers[r.id]
        assert len(a.tokens) == 12
        assert oracle.answer(r.prompt_ids, a.tokens, r.sampling) == a.tokens


def test_nan_in_the_middle_of_an_answer(poisoned, engine):
    """The tokens before it are delivered."""
    force = request(prompt_of(95, 12), temperature=0, max_tokens=9, logit_bias=((POISON, 1000.0),), logprobs=0)
    (a,) = alone(engine, [force])
    assert (a.tokens, a.reason) == ([POISON], "error")
    assert len(a.logprobs) == 1
