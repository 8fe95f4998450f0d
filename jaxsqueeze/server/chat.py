"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxsqueeze.server import logprobs
from jaxsqueeze.server.body import parse
from jaxsqueeze.server.errors import ApiError, client_fault
from jaxsqueeze.server.generation import Generation, Update
from jaxsqueeze.server.prompts import chat_prompt, check_length
from jaxsqueeze.server.sampling import chat_sampling
from jaxsqueeze.server.schema import ChatRequest
from jaxsqueeze.server.service import Service
from jaxsqueeze.server.wire import DONE, respond, sse
from jaxsqueeze.types import TokenEvent

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra={"requestBody": ChatRequest.openapi_body()})
async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    fields = await parse(request, ChatRequest)
    model = service.check_model(fields.model)
    with client_fault():
        sampling = chat_sampling(fields, service.tokenizer, service.engine.model_config.vocab_size)
    with client_fault("messages"):
        prompt = await chat_prompt(
            service,
            fields.messages,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            add_special_tokens=fields.add_special_tokens,
            kwargs=fields.chat_template_kwargs,
        )
        check_length(service, prompt.ids)
    generation = Generation(service, [prompt], sampling, fields.priority)
    answer = _Answer(generation, fields, model)
    await generation.start()
    return await respond(request, answer, stream=fields.stream, close=generation.close)


class _Answer:
    def __init__(self, generation: Generation, fields: ChatRequest, model: str) -> None:
        self._generation, self._fields = generation, fields
        self._tokenizer = generation.service.tokenizer
        self._head = {"id": f"chatcmpl-{generation.id}", "created": int(time.time()), "model": model}

    def _entries(self, update: Update) -> list[dict[str, Any]]:
        return logprobs.chat_entries(self._tokenizer, update.delta.logprobs or ())

    async def whole(self) -> dict[str, Any]:
        count = self._generation.num_choices
        texts: list[list[str]] = [[] for _ in range(count)]
        entries: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        ids: list[list[int]] = [[] for _ in range(count)]
        last: list[Update | None] = [None] * count
        scored: TokenEvent | None = None
        async for update in self._generation.updates():
            texts[update.index].append(update.delta.text)
            ids[update.index] += update.delta.token_ids
            if self._fields.logprobs:
                entries[update.index] += self._entries(update)
            if update.event.prompt_logprobs is not None:
                scored = update.event
            last[update.index] = update
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(texts[index]), "refusal": None},
                "logprobs": {"content": entries[index]} if self._fields.logprobs else None,
                "finish_reason": update.delta.finish_reason,
                "stop_reason": update.delta.stop_reason,
                **({"token_ids": ids[index]} if self._fields.return_token_ids else {}),
            }
            for index, update in enumerate(last)
            if update is not None
        ]
        body = {**self._head, "object": "chat.completion", "choices": choices, "usage": self._generation.usage()}
        if self._fields.return_token_ids:
            body["prompt_token_ids"] = list(self._generation.prompts[0].ids)
        if scored is not None:
            body["prompt_logprobs"] = logprobs.prompt_entries(self._tokenizer, scored.prompt_logprobs or ())
        return body

    async def chunks(self) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        try:
            async for update in self._generation.updates():
                if update.index not in begun:
                    begun.add(update.index)
                    yield self._chunk(update.index, {"role": "assistant", "content": ""})
                delta = update.delta
                wanted = self._fields.logprobs or self._fields.return_token_ids
                if delta.text or delta.finish_reason or (wanted and delta.token_ids):
                    yield self._chunk(update.index, {"content": delta.text} if delta.text else {}, update)
            if self._fields.wants_usage("include_usage"):
                yield self._event([], self._generation.usage())
        except ApiError as error:
            yield sse(error.body())
        yield DONE

    def _chunk(self, index: int, delta: dict[str, Any], update: Update | None = None) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if update is not None:
            if self._fields.logprobs:
                choice["logprobs"] = {"content": self._entries(update)}
            if self._fields.return_token_ids:
                choice["token_ids"] = list(update.delta.token_ids)
            if update.delta.finish_reason:
                choice["finish_reason"] = update.delta.finish_reason
                choice["stop_reason"] = update.delta.stop_reason
        usage = self._generation.usage() if self._fields.wants_usage("continuous_usage_stats") else None
        return self._event([choice], usage)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, object] | None) -> bytes:
        body = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if usage is not None or self._fields.wants_usage("include_usage"):
            body["usage"] = usage
        return sse(body)
