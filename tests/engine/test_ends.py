"""Where an answer ends: stop ids inside multi-token steps, EOS from every source, min_tokens, lengths."""

from __future__ import annotations

import pytest

from jaxsqueeze.runner.runner import Pending
from tests.engine.conftest import EOS_IDS, OPTIONS
from tests.engine.traffic import alone, random_ids, request

PROMPT = random_ids(21, 20)
GREEDY = {"temperature": 0, "ignore_eos": True}
FORCE_EOS = tuple((i, 100.0) for i in EOS_IDS)


@pytest.fixture(scope="module")
def continuation(oracle) -> list[int]:
    """Greedy tokens of PROMPT; the first ten are distinct, so each can be a stop id."""
    tokens = oracle.greedy(PROMPT, 12)
    assert len(set(tokens[:10])) == 10
    assert not set(tokens) & set(EOS_IDS)
    return tokens


def test_the_model_knows_every_eos_source(engine):
    assert engine.model_config.eos_token_ids == EOS_IDS


@pytest.mark.parametrize("place", range(8))
def test_ids_and_logprobs_end_at_the_stop_id(answer, continuation, place):
    """Steps run up to three tokens: the stop id falls on each place inside one."""
    stop = continuation[place]
    (a,) = answer(request(PROMPT, stop_token_ids=(stop, 258), max_tokens=12, logprobs=2, **GREEDY))
    assert a.tokens == continuation[: place + 1]
    assert [x.token_id for x in a.logprobs] == a.tokens
    assert (a.reason, a.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("settings", [{"stop": 2}, {"max_tokens": 5}], ids=str)
def test_the_device_stops_by_itself(engine, continuation, monkeypatch, settings):
    """A row that has ended computes no more tokens in the step at hand and in the one already dispatched."""
    outputs, result = [], Pending.result
    monkeypatch.setattr(Pending, "result", lambda self: outputs.append(result(self)) or outputs[-1])
    options = {"max_tokens": settings.get("max_tokens", 12), **GREEDY}
    if "stop" in settings:
        options["stop_token_ids"] = (continuation[settings["stop"]],)
    (a,) = alone(engine, [request(PROMPT, **options)])
    computed = [t for out in outputs for t in (*out.chunk_tokens, *out.decode_tokens.ravel()) if t != -1]
    assert computed == a.tokens
    assert len(a.tokens) == settings.get("stop", 4) + 1


@pytest.mark.parametrize("eos", EOS_IDS)
def test_each_eos_id_ends(answer, eos):
    (a,) = answer(request(PROMPT, temperature=0, max_tokens=9, logit_bias=((eos, 100.0),)))
    assert (a.tokens, a.reason, a.stop_reason) == ([eos], "stop", None)


@pytest.mark.parametrize("eos", EOS_IDS)
def test_ignored_eos_ids_are_plain_tokens(answer, eos):
    (a,) = answer(request(PROMPT, max_tokens=9, logit_bias=((eos, 100.0),), **GREEDY))
    assert (a.tokens, a.reason) == ([eos] * 9, "length")


def test_an_ignored_eos_id_can_be_a_stop_id(answer):
    eos = EOS_IDS[0]
    (a,) = answer(request(PROMPT, max_tokens=9, logit_bias=((eos, 100.0),), stop_token_ids=(eos,), **GREEDY))
    assert (a.tokens, a.reason, a.stop_reason) == ([eos], "stop", eos)


@pytest.mark.parametrize("least", [1, 2, 3, 4, 7])
def test_min_tokens_masks_every_stop_id(answer, oracle, least):
    wanted = request(PROMPT, temperature=0, max_tokens=12, min_tokens=least, logit_bias=FORCE_EOS)
    (a,) = answer(wanted)
    assert not set(a.tokens[:least]) & set(EOS_IDS)
    assert len(a.tokens) == least + 1
    assert a.tokens[-1] in EOS_IDS
    assert a.reason == "stop"
    assert oracle.answer(PROMPT, a.tokens, wanted.sampling) == a.tokens


def test_min_tokens_masks_stop_token_ids_too(answer, continuation, oracle):
    wanted = request(PROMPT, min_tokens=4, max_tokens=8, stop_token_ids=(continuation[1], continuation[2]), **GREEDY)
    (a,) = answer(wanted)
    assert not set(a.tokens[:4]) & set(wanted.sampling.stop_token_ids)
    assert oracle.answer(PROMPT, a.tokens, wanted.sampling) == a.tokens


@pytest.mark.parametrize("least", [109, 2**31, 2**70])
def test_min_tokens_past_the_context_mask_to_its_end(answer, oracle, least):
    wanted = request(PROMPT, temperature=0, min_tokens=least, logit_bias=FORCE_EOS)
    (a,) = answer(wanted)
    assert (len(a.tokens), a.reason) == (OPTIONS["max_model_len"] - len(PROMPT), "length")
    assert not set(a.tokens) & set(EOS_IDS)
    assert oracle.answer(PROMPT, a.tokens, wanted.sampling) == a.tokens


@pytest.mark.parametrize("count", range(1, 8))
def test_max_tokens(answer, continuation, count):
    (a,) = answer(request(PROMPT, max_tokens=count, **GREEDY))
    assert (a.tokens, a.reason, a.stop_reason) == (continuation[:count], "length", None)


def test_a_stop_id_as_the_last_token_allowed(answer, continuation):
    (a,) = answer(request(PROMPT, max_tokens=4, stop_token_ids=(continuation[3],), **GREEDY))
    assert (a.tokens, a.reason) == (continuation[:4], "stop")


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5])
def test_the_context_runs_out(answer, oracle, room):
    prompt = random_ids(22, OPTIONS["max_model_len"] - room)
    (a,) = answer(request(prompt, **GREEDY))
    assert (len(a.tokens), a.reason) == (room, "length")
    assert oracle.answer(prompt, a.tokens, request(prompt, **GREEDY).sampling) == a.tokens
