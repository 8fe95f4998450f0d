"""The whole path with a real engine and the unmodified ``openai`` client."""

import asyncio
import math
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.server.wire_checks import eventually, metric, stream

COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "Say something"}]
GREEDY = {"temperature": 0, "ignore_eos": True}


def text_of(server, prompt="The quick", **options) -> str:
    return server.complete(prompt, **{"max_tokens": 24, **options})["choices"][0]["text"]


def beside(server, others: list[dict], **wanted) -> dict:
    """The answer to ``wanted`` while ``others`` run."""
    with ThreadPoolExecutor(8) as pool:
        noise = [pool.submit(server.post, COMPLETIONS, **o) for o in others]
        mine = pool.submit(server.post, COMPLETIONS, **wanted)
        for n in noise:
            assert n.result().status_code == 200
        assert mine.result().status_code == 200
        return mine.result().json()


class TestClients:
    def test_sync_async_stream_agree(self, real):
        options = {"model": "scripted", "messages": USER, "max_tokens": 20, "seed": 5}
        whole = real.openai.chat.completions.create(**options)
        text = whole.choices[0].message.content
        chunks = list(
            real.openai.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

        async def several():
            client = openai.AsyncOpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0)
            answers = await asyncio.gather(*(client.chat.completions.create(**options) for _ in range(6)))
            return [a.choices[0].message.content for a in answers]

        assert asyncio.run(several()) == [text] * 6

    def test_completions_of_ids_and_text_agree(self, real):
        ids = real.post("/tokenize", prompt="The quick").json()["tokens"]
        assert text_of(real, ids, **GREEDY) == text_of(real, "The quick", **GREEDY)

    def test_prompt_lists(self, real):
        body = real.complete(["a", "b"], n=2, max_tokens=5, seed=3, ignore_eos=True)
        assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["completion_tokens"] == 20
        assert body["choices"][0]["text"] != body["choices"][1]["text"]
        alone = real.complete("b", n=2, max_tokens=5, seed=3, ignore_eos=True)
        assert [c["text"] for c in body["choices"][2:]] == [c["text"] for c in alone["choices"]]

    def test_stream_equals_whole_with_logprobs(self, real):
        options = {"prompt": "The quick", "max_tokens": 20, "logprobs": 3, "echo": True, **GREEDY}
        (whole,) = real.complete(**options)["choices"]
        choices = [c for e in stream(real, **options) for c in e["choices"]]
        assert "".join(c["text"] for c in choices) == whole["text"]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for c in choices for x in c["logprobs"][key]] == whole["logprobs"][key]


class TestSeeds:
    def test_a_seed_is_its_own_whoever_is_beside_it(self, real):
        wanted = {"prompt": "The quick", "max_tokens": 24, "seed": 42}
        alone = real.complete(**wanted)["choices"][0]["text"]
        others = [{"prompt": "x" * (i + 1), "max_tokens": 10 + i, "temperature": 1.5} for i in range(5)]
        for _ in range(3):
            random.shuffle(others)
            assert beside(real, others, **wanted)["choices"][0]["text"] == alone

    def test_choices_differ_and_repeat_stream_and_not(self, real):
        options = {"prompt": "The quick", "n": 3, "seed": 1, "max_tokens": 16}
        texts = [c["text"] for c in real.complete(**options)["choices"]]
        assert len(set(texts)) == 3
        choices = [c for e in stream(real, **options) for c in e["choices"]]
        assert ["".join(c["text"] for c in choices if c["index"] == i) for i in range(3)] == texts
        assert sorted(c["index"] for c in choices if c["finish_reason"]) == [0, 1, 2]

    def test_unseeded_requests_differ(self, real):
        assert len({text_of(real, temperature=1.5) for _ in range(4)}) > 1

    @pytest.mark.parametrize("off", [-1, 0, 259, 10**6])
    def test_top_k_off(self, real, off):
        assert text_of(real, seed=9, top_k=off, ignore_eos=True) == text_of(real, seed=9, ignore_eos=True)


class TestLogprobs:
    def scores(self, real, ids, **options) -> list[float | None]:
        body = real.complete(ids, echo=True, logprobs=0, max_tokens=0, **options)
        return body["choices"][0]["logprobs"]["token_logprobs"]

    def test_generated_sum_equals_echo_score(self, real):
        body = real.complete("The quick", logprobs=0, max_tokens=12, return_token_ids=True, **GREEDY)
        (choice,) = body["choices"]
        prompt, ids = choice["prompt_token_ids"], choice["token_ids"]
        assert len(ids) == 12
        scored = self.scores(real, [*prompt, *ids])[len(prompt) :]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(scored, abs=1e-4)

    def test_values_do_not_move_with_temperature_and_filters(self, real):
        plain = real.complete("The quick", logprobs=2, max_tokens=8, **GREEDY)["choices"][0]
        cold = real.complete(
            "The quick", logprobs=2, max_tokens=8, temperature=0.1, top_p=0.01, ignore_eos=True, seed=1
        )["choices"][0]
        assert cold["text"] == plain["text"]
        assert cold["logprobs"] == plain["logprobs"]

    def test_echo_with_top_k_one_is_finite(self, real):
        response = real.post(COMPLETIONS, prompt="The quick", echo=True, logprobs=5, top_k=1, max_tokens=3)
        assert response.status_code == 200
        values = response.json()["choices"][0]["logprobs"]["token_logprobs"]
        assert values[0] is None
        assert all(math.isfinite(v) and v > -100 for v in values[1:])

    def test_prompt_logprobs_twice_over_chunks(self, real):
        ids = [(7 * i) % 200 + 30 for i in range(33)]
        first, second = (
            real.complete(ids, prompt_logprobs=2, max_tokens=1)["choices"][0]["prompt_logprobs"] for _ in range(2)
        )
        assert first[0] is None
        assert len(first) == 33
        assert all(str(i) in entry for i, entry in zip(ids[1:], first[1:], strict=True))
        assert first == second


class TestEnds:
    def test_eos_by_bias_and_min_tokens(self, real):
        eos = real.service.engine.model_config.eos_token_ids[0]
        options = {"temperature": 0, "logit_bias": {str(eos): 100}, "max_tokens": 20}
        body = real.complete("The quick", **options)
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["text"] == ""
        assert body["usage"]["completion_tokens"] == 1
        later = real.complete("The quick", **options, min_tokens=4)
        assert later["usage"]["completion_tokens"] == 5
        assert later["choices"][0]["finish_reason"] == "stop"
        assert real.complete("The quick", **options, ignore_eos=True)["usage"]["completion_tokens"] == 20

    def test_stop_string_of_the_models_own_text(self, real):
        text = text_of(real, max_tokens=40, **GREEDY)
        stop = next(text[i : i + 2] for i in range(4, len(text) - 2) if text.find(text[i : i + 2]) == i)
        body = real.complete("The quick", max_tokens=40, stop=[stop], logprobs=0, **GREEDY)
        (choice,) = body["choices"]
        assert choice["text"] == text[: text.find(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert body["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) < 40
        with_stop = real.complete("The quick", max_tokens=40, stop=[stop], include_stop_str_in_output=True, **GREEDY)
        assert with_stop["choices"][0]["text"] == choice["text"] + stop

    def test_room_for_exactly_one_token(self, real):
        body = real.complete([65] * 127, max_tokens=9, **GREEDY)
        assert body["usage"]["completion_tokens"] == 1
        assert body["choices"][0]["finish_reason"] == "length"
        real.refused(COMPLETIONS, prompt=[65] * 128)

    def test_zero_tokens(self, real):
        body = real.complete("The quick", max_tokens=0, echo=True)
        assert body["choices"][0]["text"] == "The quick"
        assert body["usage"]["completion_tokens"] == 0

    def test_bad_word_never_comes(self, real):
        text = text_of(real, **GREEDY)
        word = next(c for c in text if c.isascii() and c.isalnum())
        assert word not in text_of(real, bad_words=[word], **GREEDY)

    def test_cut_inside_a_character_reads_the_same_streamed(self, real):
        for count in range(1, 12):
            options = {"prompt": "The quick", "max_tokens": count, "seed": 2, "temperature": 2, "ignore_eos": True}
            whole = real.complete(**options)["choices"][0]["text"]
            assert "".join(c["text"] for e in stream(real, **options) for c in e["choices"]) == whole


class TestLoad:
    def test_mixed_load_equals_solo_runs_with_preemption_and_leavers(self, real):
        rng = random.Random(0)
        wanted = [
            {
                "prompt": [rng.randrange(30, 250) for _ in range(rng.randrange(1, 60))],
                "max_tokens": rng.randrange(1, 60),
                "seed": i,
                "temperature": rng.choice([0, 0.7, 1.3]),
                "top_k": rng.choice([0, 5]),
                "top_p": rng.choice([1, 0.8]),
                "frequency_penalty": rng.choice([0, 0.5]),
                "repetition_penalty": rng.choice([1, 1.2]),
                "logprobs": rng.choice([None, 2]),
                "ignore_eos": True,
            }
            for i in range(14)
        ]

        solo = [real.complete(**w)["choices"][0] for w in wanted]
        preempted = real.service.engine.stats().preemptions

        def leave(seconds: float) -> None:
            with pytest.raises(httpx.TimeoutException):
                httpx.post(real.url + COMPLETIONS, json={"prompt": "x", "max_tokens": 120, **GREEDY}, timeout=seconds)

        with ThreadPoolExecutor(20) as pool:
            together = [pool.submit(real.complete, **w) for w in wanted]
            leavers = [pool.submit(leave, 0.02 + 0.02 * i) for i in range(4)]
            for alone, beside_others in zip(solo, [t.result()["choices"][0] for t in together], strict=True):
                assert beside_others["text"] == alone["text"]
                scores = alone["logprobs"] and pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-4)
                assert (beside_others["logprobs"] and beside_others["logprobs"]["token_logprobs"]) == scores
            for leaver in leavers:
                leaver.exception()
        assert real.service.engine.stats().preemptions > preempted

    def test_streams_beside_each_other_equal_whole_answers_alone(self, real):
        """Stop strings, echoed prompts, characters cut by max_tokens and several choices, in chunks and preempted."""
        text = text_of(real, max_tokens=40, **GREEDY)
        stop = next(text[i : i + 2] for i in range(4, len(text) - 2) if text.find(text[i : i + 2]) == i)
        long = [(7 * i) % 200 + 30 for i in range(33)]
        wanted = [
            {"prompt": "The quick", "max_tokens": 40, "stop": [stop, "no such text"], "logprobs": 2, **GREEDY},
            {"prompt": "The quick", "max_tokens": 40, "stop": [stop], "min_tokens": 30, "logprobs": 0, **GREEDY},
            {"prompt": long, "max_tokens": 9, "echo": True, "logprobs": 2, "seed": 5, "ignore_eos": True},
            {"prompt": long, "max_tokens": 0, "echo": True, "logprobs": 1},
            {"prompt": long, "max_tokens": 70, "logprobs": 1, **GREEDY},
            {"prompt": ["a", long], "n": 3, "max_tokens": 20, "seed": 3, "temperature": 1.2, "top_p": 0.9},
            *({"prompt": "x", "max_tokens": n, "seed": n, "temperature": 2, "ignore_eos": True} for n in range(1, 9)),
        ]
        alone = [real.complete(**w) for w in wanted]
        preempted = real.service.engine.stats().preemptions
        crowd = [{"prompt": long, "max_tokens": 70, "ignore_eos": True}] * 4  # more than the pool holds
        with ThreadPoolExecutor(len(crowd) + len(wanted)) as pool:
            usage = {"stream_options": {"include_usage": True}}
            others = [pool.submit(real.complete, **c) for c in crowd]
            streams = list(pool.map(lambda w: stream(real, **w, **usage), wanted))
            for other in others:
                other.result()
        assert real.service.engine.stats().preemptions > preempted
        for whole, events in zip(alone, streams, strict=True):
            assert events[-1]["usage"] == whole["usage"]
            for want in whole["choices"]:
                mine = [c for e in events for c in e["choices"] if c["index"] == want["index"]]
                assert "".join(c["text"] for c in mine) == want["text"]
                ends = [(c["finish_reason"], c["stop_reason"]) for c in mine]
                assert ends == [(None, None)] * (len(mine) - 1) + [(want["finish_reason"], want["stop_reason"])]
                for key in ("tokens", "text_offset", "token_logprobs") if want["logprobs"] else ():
                    got = [x for c in mine for x in c["logprobs"][key]]
                    right = want["logprobs"][key]
                    assert got == (pytest.approx(right, abs=1e-4) if key == "token_logprobs" else right)

    def test_a_client_that_leaves_frees_everything(self, real):
        before = metric(real, "request_success_total", finished_reason="abort")
        body = b'{"prompt": "x", "max_tokens": 120, "ignore_eos": true}'
        host, port = real.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            eventually(lambda: real.service.engine.stats().running == 1)
        eventually(lambda: real.service.engine.stats().running == 0)
        eventually(lambda: metric(real, "request_success_total", finished_reason="abort") == before + 1)
        assert metric(real, "num_requests_running") == 0
        assert metric(real, "kv_cache_usage_perc") == 0
        assert metric(real, "compilations_total") == 0

    def test_priority_is_accepted(self, real):
        assert text_of(real, priority=-3, **GREEDY) == text_of(real, **GREEDY)
