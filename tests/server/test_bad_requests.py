"""Untrusted input: each case is refused in OpenAI's error shape, and the next request works (``refused``)."""

import json
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxsqueeze.server.body import decode
from jaxsqueeze.server.config import MAX_BODY_DEPTH, ServerConfig
from jaxsqueeze.server.errors import BadRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]

BAD_COMPLETIONS = {
    "empty prompt": {"prompt": ""},
    "no prompt": {"prompt": None},
    "empty list": {"prompt": []},
    "list of nothing": {"prompt": [[]]},
    "list of an empty text": {"prompt": ["a", ""]},
    "wrong kind": {"prompt": {"a": 1}},
    "mixed kinds": {"prompt": [1, "a"]},
    "booleans are not ids": {"prompt": [True, False]},
    "floats are not ids": {"prompt": [1.5]},
    "id past the vocabulary": {"prompt": [10**6]},
    "negative id": {"prompt": [-1]},
    "huge id": {"prompt": [10**30]},
    "too long": {"prompt": "x " * 200},
    "empty stop": {"stop": [""]},
    "empty stop text": {"stop": ""},
    "stop of the wrong kind": {"stop": [1]},
    "many stops": {"stop": ["a"] * 10_000},
    "long stop": {"stop": "a" * 100_000},
    "stop id past the vocabulary": {"stop_token_ids": [10**6]},
    "negative stop id": {"stop_token_ids": [-1]},
    "many stop ids": {"stop_token_ids": list(range(1000))},
    "logit_bias past the vocabulary": {"logit_bias": {"1000000": 1}},
    "logit_bias of no id": {"logit_bias": {"abc": 1}},
    "logit_bias of a negative id": {"logit_bias": {"-1": 1}},
    "logit_bias of a fancy digit": {"logit_bias": {"²": 1}},
    "logit_bias too strong": {"logit_bias": {"1": 1e6}},
    "logit_bias too many": {"logit_bias": {str(i): 1 for i in range(5000)}},
    "huge n": {"n": 10**9},
    "n zero": {"n": 0},
    "n negative": {"n": -1},
    "n not whole": {"n": 1.5},
    "n text": {"n": "2"},
    "too many choices together": {"prompt": ["a"] * 1000, "n": 100},
    "best_of": {"best_of": 3, "n": 1},
    "suffix": {"suffix": "the end"},
    "huge logprobs": {"logprobs": 10**9},
    "negative logprobs": {"logprobs": -1},
    "huge prompt_logprobs": {"prompt_logprobs": 10**9},
    "streamed prompt_logprobs": {"prompt_logprobs": 1, "stream": True},
    "temperature": {"temperature": -1},
    "temperature too hot": {"temperature": 1e30},
    "top_p negative": {"top_p": -1},
    "top_p zero": {"top_p": 0},
    "top_p above one": {"top_p": 1.5},
    "top_k": {"top_k": -2},
    "min_p": {"min_p": 2},
    "repetition_penalty zero": {"repetition_penalty": 0},
    "repetition_penalty zero in float32": {"repetition_penalty": 1e-50},
    "frequency_penalty": {"frequency_penalty": 3},
    "presence_penalty": {"presence_penalty": -3},
    "max_tokens negative": {"max_tokens": -1},
    "min above max": {"min_tokens": 5, "max_tokens": 4},
    "seed too big": {"seed": 2**70},
    "bad word empty": {"bad_words": [""]},
    "bad words many": {"bad_words": ["a"] * 1000},
    "bad word long": {"bad_words": ["a" * 10_000]},
    "priority": {"priority": 2**40},
    "stream_options without stream": {"stream_options": {"include_usage": True}},
    "tools": {"tools": [{"type": "function"}]},
    "regex": {"guided_regex": "^+a"},
    "structured": {"structured_outputs": {"regex": "^+a"}},
    **{f"regex as {name}": {name: "^+a"} for name in ("regex", "grammar", "ebnf", "guided_grammar", "structural_tag")},
    "schema": {"json_schema": {"type": "object"}},
    "schema that allows anything": {"guided_json": {}},
    "empty grammar": {"guided_grammar": ""},
    "allowed ids": {"allowed_token_ids": [5]},
    "json": {"response_format": {"type": "json_object"}},
    "beam search": {"use_beam_search": True},
    "truncation": {"truncate_prompt_tokens": 5},
}
BAD_CHATS = {
    "no messages": {"messages": []},
    "messages of the wrong kind": {"messages": "hi"},
    "message without role": {"messages": [{"content": "hi"}]},
    "role of the wrong kind": {"messages": [{"role": 1, "content": "hi"}]},
    "no content": {"messages": [{"role": "user"}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "content of the wrong kind": {"messages": [{"role": "user", "content": {"a": 1}}]},
    "too long": {"messages": [{"role": "user", "content": "word " * 500}]},
    "huge top_logprobs": {"logprobs": True, "top_logprobs": 10**9},
    "top_logprobs alone": {"top_logprobs": 2},
    "logprobs number": {"logprobs": 5},
    "empty stop": {"stop": [""]},
    "tools": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    "tool choice": {"tool_choice": "required"},
    "regex": {"guided_regex": "^+a"},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    "audio": {"modalities": ["audio"]},
    "echo": {"echo": True},
    "many messages": {"messages": USER * 5000},
}


@pytest.mark.parametrize("case", BAD_COMPLETIONS)
def test_completions(server, case):
    server.refused(COMPLETIONS, **{"prompt": "a", **BAD_COMPLETIONS[case]})
    assert len(server.engine.seen) == 1  # the good request after it


@pytest.mark.parametrize("case", BAD_CHATS)
def test_chats(server, case):
    server.refused(CHAT, **{"messages": USER, **BAD_CHATS[case]})
    assert len(server.engine.seen) == 1


def test_message_says_what_is_wrong(server):
    assert "at most 32 items" in server.refused(COMPLETIONS, prompt="a", stop=["a"] * 33)["message"]
    assert server.refused(COMPLETIONS, prompt="a", suffix="b")["message"].startswith("suffix ")


def test_param_names_the_field(server):
    assert server.refused(COMPLETIONS, prompt="a", max_tokens="many")["param"] == "max_tokens"
    assert server.refused(COMPLETIONS, prompt=[])["param"] == "prompt"


RAW = {
    "nothing": b"",
    "not json": b"{",
    "a list": b"[]",
    "a number": b"1",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "infinite number": b'{"prompt": "a", "temperature": 1e999}',
    "endless integer": b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    "not utf-8": b'{"prompt": "\xff"}',
    "lone surrogate": b'{"prompt": "a\\ud83d"}',
    "lone surrogate as stop": b'{"prompt": "a", "stop": ["\\ud83d"]}',
    "lone surrogate as key": b'{"prompt": "a", "\\ud83d": 1}',
    "lone surrogate as model": b'{"prompt": "a", "model": "\\ud83d"}',
    "deep lists": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "deep objects": b'{"prompt": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
    "deep and unfinished": b'{"prompt": ' + b"[" * 100_000,
    "deep in an ignored field": b'{"prompt": "a", "metadata": ' + b"[" * 100 + b"]" * 100 + b"}",
}


@pytest.mark.parametrize("case", RAW)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_raw_bodies(server, case, path):
    server.survives(server.http.post(path, content=RAW[case]))


def test_body_over_the_limit(start):
    running = start(config=ServerConfig(port=0, max_body_bytes=1000))
    running.survives(running.post(COMPLETIONS, prompt="a" * 2000), 413)

    def chunks():
        for _ in range(100):
            yield b" " * 100

    running.survives(running.http.post(COMPLETIONS, content=chunks()), 413)


def test_unknown_routes_and_methods(server):
    server.survives(server.http.get("/nowhere"), 404)
    server.survives(server.http.get(COMPLETIONS), 405)


def test_lies_about_the_length(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
    server.complete("ok", max_tokens=1)


def test_messages_are_not_endless(server):
    error = server.refused(COMPLETIONS, prompt="a", model=None, logit_bias={"x" * 100_000: 1})
    assert len(error["message"]) < 1000


def test_ignored_fields_are_ignored(server):
    server.complete("a", user="me", store=True, metadata={"a": "b"}, tools=[], parallel_tool_calls=True, max_tokens=1)


def test_depth_limit_is_exact():
    def nested(depth: int) -> bytes:
        return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    decode(nested(MAX_BODY_DEPTH))
    with pytest.raises(BadRequest, match="levels deep"):
        decode(nested(MAX_BODY_DEPTH + 1))


def test_surrogate_pairs_are_fine():
    assert decode(b'{"a": "\\ud83d\\ude0a"}') == {"a": "😊"}


FIELDS = [
    *("prompt", "messages", "n", "stop", "logprobs", "top_logprobs", "echo", "stream", "max_tokens", "temperature"),
    *("logit_bias", "seed", "bad_words", "stop_token_ids", "chat_template_kwargs", "continue_final_message", "top_p"),
    *("min_tokens", "prompt_logprobs", "stream_options", "response_format", "tools", "suffix", "priority", "top_k"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"]),
    body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5),
    good=st.booleans(),
)
def test_any_json_gets_an_answer_that_is_not_our_fault(server, path, body, good):
    if good:
        body = {"prompt": "a", "messages": USER, "max_tokens": 2, **body}
    text = json.dumps(body, ensure_ascii=True)
    response = server.http.post(path, content=text)
    assert response.status_code < 500, (text, response.text)
    if response.headers["content-type"] == "application/json":
        json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} on the wire"))
