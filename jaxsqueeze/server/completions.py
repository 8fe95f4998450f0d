"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxsqueeze.server import logprobs
from jaxsqueeze.server.body import parse
from jaxsqueeze.server.errors import ApiError, client_fault
from jaxsqueeze.server.generation import Generation, Update
from jaxsqueeze.server.prompts import completion_prompts
from jaxsqueeze.server.sampling import completion_sampling
from jaxsqueeze.server.schema import CompletionRequest
from jaxsqueeze.server.service import Service
from jaxsqueeze.server.wire import DONE, respond, sse
from jaxsqueeze.types import Logprob

router = APIRouter()


@router.post("/v1/completions", openapi_extra={"requestBody": CompletionRequest.openapi_body()})
async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    fields = await parse(request, CompletionRequest)
    model = service.check_model(fields.model)
    with client_fault():
        sampling = completion_sampling(fields, service.tokenizer, service.engine.model_config.vocab_size)
    with client_fault("prompt"):
        prompts = await completion_prompts(service, fields.prompt, fields.add_special_tokens, sampling.n)
    generation = Generation(service, prompts, sampling, fields.priority)
    answer = _Answer(generation, fields, model)
    await generation.start()
    return await respond(request, answer, stream=fields.stream, close=generation.close)


class _Choice:
    """One choice's text and log-probabilities; with ``echo`` the prompt comes first."""

    def __init__(self, generation: Generation, index: int, fields: CompletionRequest) -> None:
        self._tokenizer = generation.service.tokenizer
        self._fields = fields
        self._prompt = generation.prompts[index // generation.sampling.n]
        self._begun = False
        self._echoed = ""
        if fields.echo:
            text = self._prompt.text
            self._echoed = self._decoded() if text is None else text

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._prompt.ids, self._fields.skip_special_tokens)

    def take(self, update: Update) -> tuple[str, dict[str, Any] | None]:
        """What an update adds: text and, if asked for, log-probabilities."""
        delta, text = update.delta, update.delta.text
        ids: Sequence[int] = delta.token_ids
        values: Sequence[Logprob | None] = delta.logprobs or ()
        offsets: Sequence[int] = [o + len(self._echoed) for o in delta.offsets]
        if not self._begun and self._fields.echo:
            text = self._echoed + text
            if self._fields.logprobs is not None:
                ids = [*self._prompt.ids, *ids]
                values = [*(update.event.prompt_logprobs or ()), *values]
                skip = self._fields.skip_special_tokens
                offsets = [*logprobs.prompt_offsets(self._tokenizer, self._prompt.ids, skip), *offsets]
        self._begun = True
        if self._fields.logprobs is None:
            return text, None
        return text, logprobs.completion_entries(self._tokenizer, values, ids, offsets)


class _Answer:
    def __init__(self, generation: Generation, fields: CompletionRequest, model: str) -> None:
        self._generation, self._fields = generation, fields
        self._choices = [_Choice(generation, i, fields) for i in range(generation.num_choices)]
        created = int(time.time())
        self._head = {"id": f"cmpl-{generation.id}", "object": "text_completion", "created": created, "model": model}

    async def whole(self) -> dict[str, Any]:
        choices = [self._choice(i) for i in range(self._generation.num_choices)]
        async for update in self._generation.updates():
            choice = choices[update.index]
            text, entries = self._choices[update.index].take(update)
            choice["text"] += text
            if entries is not None and choice["logprobs"] is None:
                choice["logprobs"] = entries
            elif entries is not None:
                for key, values in entries.items():
                    choice["logprobs"][key] += values
            if self._fields.prompt_logprobs is not None and update.event.prompt_logprobs is not None:
                tokenizer = self._generation.service.tokenizer
                choice["prompt_logprobs"] = logprobs.prompt_entries(tokenizer, update.event.prompt_logprobs)
            self._note(choice, update)
        return {**self._head, "choices": choices, "usage": self._generation.usage()}

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for update in self._generation.updates():
                text, entries = self._choices[update.index].take(update)
                wanted = entries is not None or self._fields.return_token_ids
                if text or update.delta.finish_reason or (wanted and update.delta.token_ids):
                    choice = self._choice(update.index, text, entries)
                    self._note(choice, update)
                    usage = self._generation.usage() if self._fields.wants_usage("continuous_usage_stats") else None
                    yield self._event([choice], usage)
            if self._fields.wants_usage("include_usage"):
                yield self._event([], self._generation.usage())
        except ApiError as error:
            yield sse(error.body())
        yield DONE

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, object] | None) -> bytes:
        body = {**self._head, "choices": choices}
        if usage is not None or self._fields.wants_usage("include_usage"):
            body["usage"] = usage
        return sse(body)

    def _choice(self, index: int, text: str = "", entries: dict[str, Any] | None = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": entries, "finish_reason": None, "stop_reason": None}
        if self._fields.return_token_ids:
            prompt = self._generation.prompts[index // self._generation.sampling.n]
            choice |= {"token_ids": [], "prompt_token_ids": list(prompt.ids)}
        return choice

    def _note(self, choice: dict[str, Any], update: Update) -> None:
        if self._fields.return_token_ids:
            choice["token_ids"] += update.delta.token_ids
        if update.delta.finish_reason:
            choice["finish_reason"], choice["stop_reason"] = update.delta.finish_reason, update.delta.stop_reason
