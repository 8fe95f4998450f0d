"""``/v1/completions`` through the wire, on exact token scripts."""

import json

import pytest

from jaxsqueeze.text.stream import ChoiceStream
from jaxsqueeze.types import FinishReason, SamplingParams, TokenEvent
from tests.server.scripted_engine import ScriptedEngine
from tests.server.wire_checks import eventually, ids_of, script, stream


class TestPrompts:
    def test_text(self, server):
        script(server, "hello", "wor", "ld")
        body = server.complete("hello", max_tokens=50, model="scripted")
        (choice,) = body["choices"]
        assert choice["text"] == "world"
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] is None
        assert body["object"] == "text_completion"
        assert body["model"] == "scripted"

    def test_ids_equal_text(self, server):
        script(server, "hello", "world")
        ids = server.engine.tokenizer.encode("hello")
        assert server.complete(ids)["choices"][0]["text"] == server.complete("hello")["choices"][0]["text"]

    def test_list_of_texts_and_n_is_prompt_major(self, server):
        script(server, "a", "xx")
        script(server, "b", "yyy")
        body = server.complete(["a", "b"], n=2, max_tokens=10)
        assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
        assert [c["text"] for c in body["choices"]] == ["xx", "xx", "yyy", "yyy"]
        assert body["usage"]["prompt_tokens"] == 2
        assert body["usage"]["completion_tokens"] == 2 * 3 + 2 * 4  # EOS is delivered too
        assert body["usage"]["total_tokens"] == 2 + 14
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}

    def test_list_of_id_lists(self, server):
        script(server, "a", "x")
        script(server, "b", "y")
        tokenizer = server.engine.tokenizer
        body = server.complete([tokenizer.encode("a"), tokenizer.encode("b")])
        assert [c["text"] for c in body["choices"]] == ["x", "y"]

    def test_default_is_sixteen_tokens(self, server):
        body = server.complete("a")
        assert body["usage"]["completion_tokens"] == 16
        assert body["choices"][0]["finish_reason"] == "length"

    def test_choices_of_a_seeded_request_have_their_own_fixed_seeds(self, server):
        server.complete("a", n=3, seed=1, max_tokens=1)
        first = [r.sampling.seed for r in server.engine.seen]
        server.engine.seen.clear()
        server.complete("a", n=3, seed=1, max_tokens=1)
        assert [r.sampling.seed for r in server.engine.seen] == first
        assert len(set(first)) == 3

    def test_prompt_that_leaves_room_for_one_token(self, server):
        ids = ids_of(server.engine.tokenizer, "x" * (server.engine.max_model_len - 1))
        body = server.complete(ids, max_tokens=5)
        assert body["usage"]["completion_tokens"] == 1
        assert body["choices"][0]["finish_reason"] == "length"
        error = server.refused("/v1/completions", prompt=[*ids, ids[0]])
        assert "maximum context length" in error["message"]

    def test_raw_prompt_gets_its_bos(self, start, sentencepiece):
        engine = ScriptedEngine(sentencepiece)
        running = start(engine=engine)
        running.complete("the", max_tokens=1)
        running.complete("", max_tokens=1)
        assert engine.seen[0].prompt_ids[0] == sentencepiece.bos_token_id
        assert engine.seen[1].prompt_ids == (sentencepiece.bos_token_id,)
        running.complete("the", max_tokens=1, add_special_tokens=False)
        assert sentencepiece.bos_token_id not in engine.seen[2].prompt_ids


class TestTokenIds:
    def test_whole_and_streamed(self, server):
        script(server, "p", "aé", "b")
        tokenizer = server.engine.tokenizer
        want = [*ids_of(tokenizer, "aéb"), tokenizer.eos_token_id]
        (choice,) = server.complete("p", return_token_ids=True)["choices"]
        assert choice["token_ids"] == want
        assert choice["prompt_token_ids"] == tokenizer.encode("p")
        events = stream(server, prompt="p", return_token_ids=True)
        assert [i for e in events for c in e["choices"] for i in c["token_ids"]] == want
        assert "token_ids" not in server.complete("p")["choices"][0]

    def test_chat(self, server):
        body = {"messages": [{"role": "user", "content": "a"}], "return_token_ids": True, "max_tokens": 5}
        whole = server.post("/v1/chat/completions", **body).json()
        assert whole["prompt_token_ids"] == list(server.engine.seen[-1].prompt_ids)
        events = stream(server, "/v1/chat/completions", **body)
        streamed = [i for e in events for c in e["choices"] for i in c.get("token_ids", [])]
        assert streamed == whole["choices"][0]["token_ids"]
        assert len(streamed) == 5


class TestSamplingReachesTheEngine:
    def test_every_parameter(self, server):
        given = {
            "max_tokens": 5,
            "min_tokens": 2,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "frequency_penalty": 0.2,
            "presence_penalty": -0.3,
            "seed": 7,
            "stop_token_ids": [9, 10],
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "prompt_logprobs": 2,
        }
        server.complete("a", **given, stop="zz", logit_bias={"5": -100, "6": 1.5}, logprobs=3, priority=4)
        (request,) = server.engine.seen
        want = SamplingParams(
            **{**given, "stop_token_ids": (9, 10)}, stop=("zz",), logit_bias=((5, -100), (6, 1.5)), logprobs=3
        )
        assert request.sampling == want
        assert request.priority == 4

    def test_absent_values_are_openai_defaults(self, server):
        server.complete("a")
        assert server.engine.seen[0].sampling == SamplingParams(max_tokens=16)
        server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
        assert server.engine.seen[1].sampling == SamplingParams()

    def test_null_is_absent(self, server):
        server.complete("a", temperature=None, top_p=None, stop=None, n=None, logit_bias=None, stream=None, seed=None)
        assert server.engine.seen[0].sampling == SamplingParams(max_tokens=16)

    @pytest.mark.parametrize("off", [0, -1])
    def test_top_k_off(self, server, off):
        server.complete("a", top_k=off)
        assert server.engine.seen[0].sampling.top_k in (0, -1)

    def test_bad_words_in_both_spellings(self, server):
        server.complete("a", bad_words=["London"])
        tokenizer = server.engine.tokenizer
        spelled = {b"".join(tokenizer.token_bytes(i) for i in w) for w in server.engine.seen[0].sampling.bad_words_ids}
        assert spelled == {b"London", b" London"}


class TestStop:
    def test_stop_string_never_leaks_and_frees_the_request(self, server):
        server.engine.step_seconds = 0.02
        script(server, "p", "abDEF", "G", "HI", "Jx", *["more"] * 8, eos=False)
        events = stream(server, prompt="p", stop="DEFGHIJ", max_tokens=40, stream_options={"include_usage": True})
        assert "".join(c["text"] for e in events for c in e["choices"]) == "ab"
        last = events[-2]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", "DEFGHIJ")
        assert events[-1]["usage"]["completion_tokens"] == len("abDEFGHIJ")
        eventually(lambda: len(server.engine.aborted) == 1)
        assert not server.engine.has_work()

    def test_stop_inside_a_multi_token_step_ends_everything_there(self, server):
        script(server, "p", "aSbc")
        body = server.complete("p", stop=["S"], logprobs=0, max_tokens=40)
        (choice,) = body["choices"]
        assert choice["text"] == "a"
        assert choice["logprobs"]["tokens"] == ["a", "S"]
        assert body["usage"]["completion_tokens"] == 2

    def test_stop_id_is_reported(self, server):
        script(server, "p", "abc")
        (b,) = ids_of(server.engine.tokenizer, "b")
        (choice,) = server.complete("p", stop_token_ids=[b])["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", b)

    def test_min_tokens_makes_an_early_stop_plain_text(self, server):
        script(server, "p", "a\nbc\nd")
        assert server.complete("p", stop="\n", min_tokens=4, max_tokens=40)["choices"][0]["text"] == "a\nbc"

    def test_eos_stops_even_if_its_text_is_hidden(self, server):
        script(server, "p", "ab")
        for skip in (True, False):
            (choice,) = server.complete("p", skip_special_tokens=skip, max_tokens=40)["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")


class TestStreaming:
    def test_split_characters_of_two_streams_at_once(self, server):
        tokenizer = server.engine.tokenizer
        server.engine.scripts["p"] = [(i,) for i in ids_of(tokenizer, "a😊是")] + [(tokenizer.eos_token_id,)]
        server.engine.scripts["q"] = [(i,) for i in ids_of(tokenizer, "é👩‍👩‍👧e\u0301")] + [(tokenizer.eos_token_id,)]
        events = stream(server, prompt=["p", "q"], max_tokens=60)
        for index, want in ((0, "a😊是"), (1, "é👩‍👩‍👧e\u0301")):
            assert "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index) == want
        assert "\ufffd" not in json.dumps(events, ensure_ascii=False)

    def test_max_tokens_in_the_middle_of_a_character(self, server):
        tokenizer = server.engine.tokenizer
        server.engine.scripts["p"] = [(i,) for i in ids_of(tokenizer, "a😊")]
        whole = server.complete("p", max_tokens=3)["choices"][0]["text"]
        events = stream(server, prompt="p", max_tokens=3)
        assert "".join(c["text"] for e in events for c in e["choices"]) == whole == "a\ufffd"

    def test_finish_is_null_until_the_end_then_usage_then_done(self, server):
        script(server, "p", "a", "b")
        events = stream(server, prompt="p", stream_options={"include_usage": True})
        reasons = [c["finish_reason"] for e in events for c in e["choices"]]
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        assert reasons[-1] == "stop"
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 3
        assert all(e["usage"] is None for e in events[:-1])

    def test_no_usage_unless_asked(self, server):
        assert all("usage" not in e for e in stream(server, prompt="p", max_tokens=2))

    def test_continuous_usage(self, server):
        script(server, "p", "a", "bc", "d")
        events = stream(server, prompt="p", stream_options={"continuous_usage_stats": True})
        assert [e["usage"]["completion_tokens"] for e in events] == [1, 3, 4, 5]

    def test_n_choices_finish_once_each_with_unequal_lengths(self, server):
        script(server, "a", "x")
        script(server, "b", "yyyy", "yy")
        events = stream(server, prompt=["a", "b"], n=3, max_tokens=30)
        ends = [c["index"] for e in events for c in e["choices"] if c["finish_reason"]]
        assert sorted(ends) == [0, 1, 2, 3, 4, 5]

    def test_stream_equals_whole(self, server):
        script(server, "p", "one ", "twoST", "x STO", "P three")
        options = {"prompt": "p", "stop": ["STOP"], "logprobs": 2, "max_tokens": 60, "echo": True}
        whole = server.complete(**options)
        events = stream(server, **options)
        choices = [c for e in events for c in e["choices"]]
        (want,) = whole["choices"]
        assert "".join(c["text"] for c in choices) == want["text"] == "pone twoSTx "
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for c in choices for x in c["logprobs"][key]] == want["logprobs"][key]


class TestEchoAndLogprobs:
    def test_offsets_count_the_prompt(self, server):
        tokenizer = server.engine.tokenizer
        prompt = ids_of(tokenizer, "ab")
        script(server, "ab", "c", "d")
        (choice,) = server.complete(prompt, echo=True, logprobs=0, max_tokens=2)["choices"]
        assert choice["text"] == "abcd"
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
        events = stream(server, prompt=prompt, echo=True, logprobs=0, max_tokens=2)
        assert [o for e in events for c in e["choices"] for o in c["logprobs"]["text_offset"]] == [0, 1, 2, 3]

    def test_offsets_without_echo_are_those_of_the_returned_text(self, server):
        script(server, "ab", "c", "d")
        (choice,) = server.complete("ab", logprobs=0, max_tokens=2)["choices"]
        assert choice["logprobs"]["text_offset"] == [0, 1]

    @pytest.mark.parametrize("streamed", [False, True])
    def test_zero_tokens_returns_the_scored_prompt(self, server, streamed):
        tokenizer = server.engine.tokenizer
        prompt = ids_of(tokenizer, "abc")
        options = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
        if streamed:
            (event,) = stream(server, **options)
            (choice,) = event["choices"]
        else:
            body = server.complete(**options)
            (choice,) = body["choices"]
            assert body["usage"]["completion_tokens"] == 0
        assert choice["text"] == "abc"
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
        assert choice["logprobs"]["token_logprobs"] == [None, *(-i / 1000 for i in prompt[1:])]
        assert choice["logprobs"]["top_logprobs"][0] is None

    def test_minus_infinity_is_finite_on_the_wire(self, server):
        response = server.post("/v1/completions", prompt="ab", echo=True, logprobs=1, top_k=1, max_tokens=1)
        assert response.status_code == 200
        assert "Infinity" not in response.text
        assert "NaN" not in response.text
        values = [v for top in response.json()["choices"][0]["logprobs"]["top_logprobs"] if top for v in top.values()]
        assert -9999.0 in values

    def test_token_text_is_text_not_glyphs(self, server):
        tokenizer = server.engine.tokenizer
        the = tokenizer.token_id("Ġthe")
        server.engine.scripts["p"] = [(the,), tuple(ids_of(tokenizer, "是"))]
        (choice,) = server.complete("p", logprobs=0, max_tokens=4)["choices"]
        assert choice["text"] == " the是"
        assert choice["logprobs"]["tokens"] == [" the", "bytes:\\xe6", "bytes:\\x98", "bytes:\\xaf"]
        assert choice["logprobs"]["text_offset"] == [0, 4, 4, 4]

    def test_prompt_logprobs_field(self, server):
        prompt = ids_of(server.engine.tokenizer, "ab")
        (choice,) = server.complete(prompt, prompt_logprobs=1, max_tokens=1)["choices"]
        first, second = choice["prompt_logprobs"]
        assert first is None
        assert second[str(prompt[1])] == {"logprob": -prompt[1] / 1000, "rank": 1, "decoded_token": "b"}

    def test_echo_without_logprobs(self, server):
        script(server, "ab", "c")
        assert server.complete("ab", echo=True, max_tokens=1)["choices"][0]["text"] == "abc"

    def test_echo_of_text_is_the_clients_own(self, start, sentencepiece):
        running = start(engine=ScriptedEngine(sentencepiece))
        running.engine.scripts["Hello"] = [(sentencepiece.token_id("▁world"),)]
        (choice,) = running.complete("Hello", echo=True, max_tokens=1)["choices"]
        assert choice["text"] == "Hello world"


def test_openai_client(server):
    script(server, "hello", "wor", "ld")
    answer = server.openai.completions.create(model="scripted", prompt="hello", logprobs=1, max_tokens=9)
    assert answer.choices[0].text == "world"
    assert answer.choices[0].logprobs.tokens[0] == "w"
    chunks = list(server.openai.completions.create(model="alias", prompt="hello", stream=True, max_tokens=9))
    assert "".join(c.choices[0].text for c in chunks) == "world"
    assert chunks[-1].model == "alias"


def test_choice_stream_is_what_the_server_speaks(server):
    """The offline API and the server share ChoiceStream: same ids, same text."""
    script(server, "p", "aé", "b")
    text = server.complete("p", max_tokens=40)["choices"][0]["text"]
    tokenizer = server.engine.tokenizer
    stream_ = ChoiceStream(tokenizer, SamplingParams(), tokenizer.encode("p"))
    ids = (*ids_of(tokenizer, "aéb"), tokenizer.eos_token_id)
    assert stream_.push(TokenEvent("r", ids, finish_reason=FinishReason.STOP)).text == text
