"""Pages and slots: what cannot fit is refused at the door, what leaves gives everything back."""

from __future__ import annotations

import pytest

from jaxsqueeze.config import EngineConfig
from jaxsqueeze.engine import Engine
from jaxsqueeze.types import RequestRefused
from tests.engine.conftest import OPTIONS, PAGE_BYTES
from tests.engine.traffic import Desk, random_ids, request

PROMPT = random_ids(51, 20)
GREEDY = {"temperature": 0, "ignore_eos": True}


class TestDoor:
    def test_too_long_is_refused_at_once_and_the_next_is_served(self, engine, oracle):
        desk = Desk(engine)
        running = request(random_ids(50, 90), max_tokens=20, **GREEDY)
        desk.add(running)
        desk.step()
        for length in (128, 200):
            with pytest.raises(RequestRefused, match=f"the prompt has {length} tokens"):
                engine.add(request(random_ids(0, length)))
        after = request(PROMPT, max_tokens=5, **GREEDY)
        desk.add(after)
        desk.finish()
        for r in (running, after):
            a = desk.answers[r.id]
            assert a.reason == "length"
            assert oracle.answer(r.prompt_ids, a.tokens, r.sampling) == a.tokens

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ({"prompt": ()}, "the prompt is empty"),
            ({"prompt": (3, 259)}, "token id 259 is outside the vocabulary"),
            ({"prompt": (-1,)}, "token id -1"),
            ({"stop_token_ids": (259,)}, "stop_token_ids: token id 259"),
            ({"logit_bias": ((300, 1.0),)}, "logit_bias: token id 300"),
            ({"bad_words_ids": ((4, 999),)}, "bad_words: token id 999"),
            ({"n": 2}, "n = 2"),
            ({"stop_token_ids": tuple(range(10, 42))}, "34 stop ids"),
        ],
        ids=lambda x: x if isinstance(x, str) else next(iter(x)),
    )
    def test_what_can_never_run(self, engine, bad, message):
        with pytest.raises(RequestRefused, match=message):
            engine.add(request(**{"prompt": PROMPT, **bad}))
        assert not engine.stats().waiting

    def test_an_id_in_use(self, engine):
        desk = Desk(engine)
        desk.add(request(PROMPT, id="same", max_tokens=3))
        with pytest.raises(RequestRefused, match="'same' is in use"):
            engine.add(request(PROMPT, id="same"))
        desk.finish()
        desk.add(request(PROMPT, id="same", max_tokens=3))
        desk.finish()

    def test_an_engine_that_could_serve_nothing_does_not_start(self, model):
        with pytest.raises(ValueError, match="lower --max-model-len or raise --kv-bytes"):
            Engine(EngineConfig(model=model, dtype="float32", kv_bytes=20 * PAGE_BYTES, **OPTIONS))


class TestAborts:
    @pytest.mark.parametrize("steps", range(8))
    def test_at_any_moment_frees_everything(self, engine, oracle, steps):
        """Waiting, in a chunk, between chunks, decoding, with a step in flight."""
        desk = Desk(engine)
        stays = request(PROMPT, max_tokens=12, **GREEDY)
        leaves = request(random_ids(52, 100), max_tokens=20, logprobs=1, prompt_logprobs=1, **GREEDY)
        waits = request(random_ids(53, 60), max_tokens=5, **GREEDY)
        desk.add(stays, leaves, waits)
        for _ in range(steps):
            desk.step()
        used = engine.stats().pages_used
        assert desk.abort(leaves.id)
        assert not desk.abort(leaves.id)
        engine.check_integrity()
        assert all(now <= before for now, before in zip(engine.stats().pages_used, used, strict=True))
        got = len(desk.answers[leaves.id].tokens)
        desk.finish()
        assert len(desk.answers[leaves.id].tokens) == got
        assert desk.answers[leaves.id].reason is None
        for r in (stays, waits):
            a = desk.answers[r.id]
            assert len(a.tokens) == r.sampling.max_tokens
            assert oracle.answer(r.prompt_ids, a.tokens, r.sampling) == a.tokens

    def test_a_new_request_under_an_aborted_id(self, engine, oracle):
        """Tokens in flight of the old one never reach the new one."""
        desk = Desk(engine)
        desk.add(request(random_ids(54, 30), id="x", max_tokens=30, **GREEDY))
        desk.run(until=lambda: bool(desk.answers["x"].tokens))
        desk.abort("x")
        again = request(PROMPT, id="x", max_tokens=8, **GREEDY)
        desk.add(again)
        desk.finish()
        assert oracle.answer(PROMPT, desk.answers["x"].tokens, again.sampling) == desk.answers["x"].tokens
        assert len(desk.answers["x"].tokens) == 8

    def test_everything_at_once(self, engine):
        desk = Desk(engine)
        requests = [request(random_ids(i, 10 + 9 * i), max_tokens=20, **GREEDY) for i in range(8)]
        desk.add(*requests)
        for _ in range(4):
            desk.step()
        for r in requests:
            assert desk.abort(r.id)
        desk.finish()


class TestOrder:
    def test_priority_then_arrival(self, engine):
        desk = Desk(engine)
        names = {"late": 5, "first": 0, "second": 0, "urgent": -1}
        begun = []
        for name, priority in names.items():
            desk.add(request(random_ids(5, 64), id=name, priority=priority, max_tokens=2, **GREEDY))
        while engine.has_work():
            begun += [e.request_id for e in desk.step() if e.request_id not in begun]
        assert begun == ["urgent", "first", "second", "late"]

    def test_a_long_prompt_does_not_stop_those_who_decode(self, engine):
        desk = Desk(engine)
        desk.add(request(PROMPT, id="decodes", max_tokens=40, **GREEDY))
        desk.run(until=lambda: bool(desk.answers["decodes"].tokens))
        desk.add(request(random_ids(55, 110), id="long", max_tokens=1, **GREEDY))
        without = 0
        while not desk.answers["long"].tokens:
            without = 0 if any(e.request_id == "decodes" for e in desk.step()) else without + 1
            assert without <= 1
        desk.finish()
        assert len(desk.answers["decodes"].tokens) == 40
