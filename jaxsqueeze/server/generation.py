"""One call's requests from submission to the last token: all prompts and choices, their text, usage and metrics."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Sequence

from jaxsqueeze.server.errors import ApiError, BadRequest
from jaxsqueeze.server.metrics import RequestTimes
from jaxsqueeze.server.prompts import Prompt
from jaxsqueeze.server.service import Service
from jaxsqueeze.server.worker import Ticket
from jaxsqueeze.text.stream import ChoiceStream, Delta
from jaxsqueeze.types import FinishReason, Request, RequestRefused, SamplingParams, TokenEvent, split_choices


@dataclasses.dataclass(frozen=True)
class Update:
    """News of one choice. Choices are numbered prompt-major: all of prompt 0's, then prompt 1's."""

    index: int
    delta: Delta
    event: TokenEvent


class Generation:
    """Iterate ``updates`` to the end, and ``close`` in any case: it aborts what has not ended."""

    def __init__(
        self, service: Service, prompts: Sequence[Prompt], sampling: SamplingParams, priority: int = 0
    ) -> None:
        self.service, self.prompts, self.sampling = service, prompts, sampling
        self.id = uuid.uuid4().hex
        now = time.monotonic()
        self._requests = [
            choice
            for index, prompt in enumerate(prompts)
            for choice in split_choices(Request(f"{self.id}-{index}", prompt.ids, sampling, priority, now))
        ]
        self._streams = [
            ChoiceStream(service.tokenizer, r.sampling, r.prompt_ids if self._prompt(i).continued else ())
            for i, r in enumerate(self._requests)
        ]
        self._times = [RequestTimes(service.metrics, len(r.prompt_ids)) for r in self._requests]
        self._cached = [0] * len(prompts)
        self._ticket: Ticket | None = None

    @property
    def num_choices(self) -> int:
        return len(self._requests)

    def _prompt(self, index: int) -> Prompt:
        return self.prompts[index // self.sampling.n]

    async def start(self) -> None:
        """Hands every request to the engine, or none. Raises ApiError 400 if the engine refuses one."""
        self.service.metrics.choices.observe(self.sampling.n)
        try:
            self._ticket = await self.service.worker.submit(self._requests)
        except RequestRefused as error:
            raise BadRequest(str(error)) from error

    async def updates(self) -> AsyncIterator[Update]:
        """Until every choice has ended. Raises ApiError if one fails; the others are then aborted by ``close``."""
        assert self._ticket is not None, "start first"
        open_choices = self.num_choices
        while open_choices:
            index, event = await self._ticket.events.get()
            stream, times = self._streams[index], self._times[index]
            if stream.finished:
                continue  # on its way when a stop string ended the choice
            if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                times.ended(event.finish_reason)
                status = 500 if event.finish_reason is FinishReason.ERROR else 503
                raise ApiError(status, event.error or "the request was aborted")
            delta = stream.push(event)
            which = index // self.sampling.n
            self._cached[which] = max(self._cached[which], event.num_cached_tokens)
            times.tokens(len(delta.token_ids), event.num_cached_tokens)
            if delta.finish_reason:
                open_choices -= 1
                times.ended(delta.finish_reason)
                if event.finish_reason is None:  # a stop string: the engine does not know
                    self.service.worker.abort([self._requests[index].id])
            yield Update(index, delta, event)

    def close(self) -> None:
        """Frees whatever is still running; counts it as aborted. Calling it again changes nothing."""
        if self._ticket is None:
            return
        self.service.worker.abort(r.id for r in self._requests)
        for stream, times in zip(self._streams, self._times, strict=True):
            if stream.finished is None:
                times.ended(FinishReason.ABORT)

    def usage(self) -> dict[str, object]:
        """Tokens so far: each prompt once, and every token delivered."""
        prompt = sum(len(p.ids) for p in self.prompts)
        completion = sum(s.num_tokens for s in self._streams)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }
