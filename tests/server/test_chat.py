"""``/v1/chat/completions`` with the unmodified ``openai`` client."""

import asyncio
import dataclasses

import openai
import pytest

from jaxsqueeze.config import EngineConfig
from jaxsqueeze.text.tokenizer import Tokenizer
from tests.server.scripted_engine import ScriptedEngine
from tests.server.wire_checks import ids_of, script, stream
from tests.text import build_tokenizers

USER = [{"role": "user", "content": "hi"}]
RENDERED = "user\nhi\nassistant\n"  # what the template makes of USER, special tokens aside
CHAT = "/v1/chat/completions"


def answer(server, text: str, prompt: str = RENDERED) -> None:
    script(server, prompt, *text)


def test_sync(server):
    answer(server, "Hello there")
    got = server.openai.chat.completions.create(model="scripted", messages=USER)
    assert got.choices[0].message.content == "Hello there"
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].finish_reason == "stop"
    assert got.usage.completion_tokens == len("Hello there") + 1
    assert got.usage.prompt_tokens_details.cached_tokens == 1


def test_sync_stream(server):
    answer(server, "Hello there")
    chunks = list(
        server.openai.chat.completions.create(
            model="scripted", messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:-1])
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello there"
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "stop"
    assert all(c.choices[0].finish_reason is None for c in chunks[:-2])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert len({c.id for c in chunks}) == 1


def test_async_and_async_stream_together(server):
    answer(server, "Hello there")

    async def both():
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)

        async def streamed() -> str:
            chunks = await client.chat.completions.create(model="scripted", messages=USER, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in chunks])

        async def whole() -> str:
            got = await client.chat.completions.create(model="scripted", messages=USER)
            return got.choices[0].message.content

        return await asyncio.gather(streamed(), whole(), streamed(), whole())

    assert asyncio.run(both()) == ["Hello there"] * 4


def test_logprobs(server):
    tokenizer = server.engine.tokenizer
    ids = [tokenizer.token_id("Ġthe"), *ids_of(tokenizer, "是")]
    server.engine.scripts[RENDERED] = [tuple(ids)]
    got = server.openai.chat.completions.create(
        model="scripted", messages=USER, logprobs=True, top_logprobs=2, max_completion_tokens=4
    )
    content = got.choices[0].logprobs.content
    assert content[0].token == " the"
    assert [bytes(c.bytes) for c in content] == [b" the", b"\xe6", b"\x98", b"\xaf"]
    assert content[0].logprob == -ids[0] / 1000
    assert [t.logprob for t in content[0].top_logprobs] == [-9999.0, -0.008]
    plain = server.openai.chat.completions.create(model="scripted", messages=USER, logprobs=True, max_tokens=4)
    assert plain.choices[0].logprobs.content[0].top_logprobs == []
    events = stream(server, CHAT, messages=USER, logprobs=True, top_logprobs=2, max_tokens=4)
    streamed = [x for e in events for c in e["choices"] for x in (c["logprobs"] or {"content": []})["content"]]
    assert [x["token"] for x in streamed] == [c.token for c in content]


def test_one_token_for_a_chinese_character(start):
    tokenizer = Tokenizer(build_tokenizers.byte_level(vocab_size=900), {"eos_token": "</s>"}, build_tokenizers.CHAT)
    (token,) = tokenizer.encode("是", add_special_tokens=False)
    running = start(engine=ScriptedEngine(tokenizer))
    running.engine.scripts[RENDERED] = [(token,)]
    options = {"messages": USER, "logprobs": True, "max_tokens": 1}
    (entry,) = running.post(CHAT, **options).json()["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("是", [0xE6, 0x98, 0xAF])
    streamed = [
        x
        for e in stream(running, CHAT, **options)
        for c in e["choices"]
        if c["logprobs"]
        for x in c["logprobs"]["content"]
    ]
    assert streamed == [entry]


def test_n_choices_stream_and_not(server):
    answer(server, "xy")
    got = server.openai.chat.completions.create(model="scripted", messages=USER, n=3, seed=1)
    assert [c.index for c in got.choices] == [0, 1, 2]
    assert got.usage.completion_tokens == 9
    assert got.usage.prompt_tokens == len(server.engine.seen[0].prompt_ids)
    events = stream(server, CHAT, messages=USER, n=3, seed=1)
    for index in range(3):
        mine = [c for e in events for c in e["choices"] if c["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == "xy"
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        assert [c["delta"].get("role") for c in mine].count("assistant") == 1


def test_max_completion_tokens_comes_before_max_tokens(server):
    server.openai.chat.completions.create(model="scripted", messages=USER, max_tokens=9, max_completion_tokens=2)
    assert server.engine.seen[0].sampling.max_tokens == 2


def test_prompt_logprobs(server):
    body = server.post(CHAT, messages=USER, prompt_logprobs=0, max_tokens=1).json()
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


def test_bos_once_and_answers_start_anew(start, sentencepiece):
    running = start(engine=ScriptedEngine(sentencepiece))
    running.engine.before_add = lambda request: running.engine.scripts.update(
        {sentencepiece.decode(request.prompt_ids): [(sentencepiece.token_id("▁Hello"),)]}
    )
    for add_special_tokens in (False, True):
        body = running.post(CHAT, messages=USER, max_tokens=1, add_special_tokens=add_special_tokens).json()
        assert body["choices"][0]["message"]["content"] == "Hello"
        assert running.engine.seen[-1].prompt_ids.count(sentencepiece.bos_token_id) == 1


class TestMessages:
    def prompt_text(self, server, messages, **body) -> str:
        response = server.post(CHAT, messages=messages, max_tokens=1, **body)
        assert response.status_code == 200, response.text
        return server.engine.tokenizer.decode(server.engine.seen[-1].prompt_ids, skip_special_tokens=False)

    @pytest.mark.parametrize("role", ["user", "tool", "system"])
    def test_part_lists_equal_the_string(self, server, role):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        as_parts = self.prompt_text(server, [{"role": role, "content": parts, "tool_call_id": "1"}])
        assert as_parts == self.prompt_text(server, [{"role": role, "content": "ab", "tool_call_id": "1"}])

    def test_continuation_leaves_the_turn_open(self, server):
        messages = [*USER, {"role": "assistant", "content": "Sure, "}]
        text = self.prompt_text(server, messages, continue_final_message=True, add_generation_prompt=False)
        assert text.endswith("<|im_start|>assistant\nSure, ")
        assert self.prompt_text(server, messages, continue_final_message=True) == text

    def test_both_flags_are_refused(self, server):
        error = server.refused(CHAT, messages=USER, continue_final_message=True, add_generation_prompt=True)
        assert "cannot both" in error["message"]

    @pytest.mark.parametrize("key", ["chat_template", "messages", "tokenize"])
    def test_template_override_is_refused(self, server, key):
        server.refused(CHAT, messages=USER, chat_template_kwargs={key: "{{ 1 }}"})

    def test_request_template_is_refused(self, server):
        assert "chat_template" in server.refused(CHAT, messages=USER, chat_template="{{ 1 }}")["message"]

    def test_template_error_is_the_clients(self, start, tokenizer):
        template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
        strict = Tokenizer(build_tokenizers.byte_level(), {"eos_token": "</s>"}, template)
        running = start(engine=ScriptedEngine(strict))
        error = running.refused(CHAT, messages=[{"role": "system", "content": "x"}, *USER])
        assert "System role not supported" in error["message"]
        assert running.post(CHAT, messages=USER, max_tokens=1).status_code == 200

    def test_model_without_template(self, start, tokenizer):
        running = start(engine=ScriptedEngine(Tokenizer(build_tokenizers.byte_level(), {"eos_token": "</s>"})))
        assert "/v1/completions" in running.refused(CHAT, messages=USER)["message"]


class TestTokenizeRoutes:
    def test_text(self, server):
        body = server.post("/tokenize", prompt="hello the", return_token_strs=True).json()
        assert body["tokens"] == server.engine.tokenizer.encode("hello the")
        assert body["count"] == len(body["tokens"])
        assert body["max_model_len"] == 128
        assert "".join(body["token_strs"]) == "hello the"
        assert server.post("/detokenize", tokens=body["tokens"]).json() == {"prompt": "hello the"}

    def test_messages_are_what_the_chat_route_sends(self, server):
        tokens = server.post("/tokenize", messages=USER).json()["tokens"]
        server.post(CHAT, messages=USER, max_tokens=1)
        assert tuple(tokens) == server.engine.seen[-1].prompt_ids

    def test_empty_and_wrong(self, server):
        assert server.post("/tokenize", prompt="").json()["tokens"] == []
        server.refused("/tokenize")
        server.refused("/tokenize", prompt="a", messages=USER)
        server.refused("/detokenize", tokens=[-1])
        server.refused("/detokenize", tokens=[10**9])
        server.refused("/detokenize", tokens="a")


class TestInfo:
    def test_models(self, server):
        assert [m.id for m in server.openai.models.list()] == ["scripted", "alias"]
        assert server.openai.models.retrieve("alias").id == "alias"
        with pytest.raises(openai.NotFoundError):
            server.openai.models.retrieve("other")

    def test_models_say_how_they_are_stored_and_what_it_cost(self, start, tokenizer):
        engine = ScriptedEngine(tokenizer)
        every = {"ref_perplexity": 20.0, "perplexity": 21.0, "kl_p99.9": 0.75, "kl_mean": 0.01}
        report = {"candidate": "c", "reference": "r (bfloat16)", "tokens": 4096, "all": every, "rare": {"flips": 0.02}}
        stored = {"quantisation": "int4-g64, 12 of 120 weights int8", "quality": report}
        engine.manifest = dataclasses.replace(engine.manifest, **stored)
        engine.config = EngineConfig(dtype="bfloat16", kv_dtype="v=int8")
        client = start(engine=engine).openai
        for card in (client.models.list().data[0], client.models.retrieve("scripted")):
            assert card.object == "model"
            assert card.quantisation == {"weights": stored["quantisation"], "k": "bfloat16", "v": "int8"}
            assert card.quality == {
                "reference": "r (bfloat16)",
                "tokens": 4096,
                "perplexity_change": pytest.approx(0.05),
                "kl_p99.9": 0.75,
                "rare_flips": 0.02,
            }

    def test_models_without_a_report(self, server):
        card = server.openai.models.retrieve("scripted")
        assert (card.quantisation["weights"], card.quality) == ("bfloat16", None)

    def test_unknown_model_is_404(self, server):
        error = server.refused(CHAT, 404, model="other", messages=USER)
        assert error["code"] == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            server.openai.completions.create(model="other", prompt="a")

    def test_version_and_health(self, server):
        assert server.http.get("/version").json()["version"]
        assert server.http.get("/health").json() == {"status": "ready"}

    def test_openapi_lists_the_bodies(self, server):
        paths = server.http.get("/openapi.json").json()["paths"]
        schema = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert {"prompt", "max_tokens", "echo", "top_k"} <= set(schema["properties"])
