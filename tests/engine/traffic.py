"""Drives an engine by hand: adds requests, steps, checks its structures after every step, collects the answers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxsqueeze.engine import Engine
from jaxsqueeze.types import FinishReason, Logprob, Request, SamplingParams, TokenEvent

MOST_STEPS = 2000


@dataclasses.dataclass
class Answer:
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Logprob] | None = None
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None

    def take(self, event: TokenEvent) -> None:
        assert self.reason is None, "an event after the last"
        self.tokens += event.token_ids
        if event.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *event.logprobs]
        if event.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "the prompt's scores came twice"
            self.prompt_logprobs = event.prompt_logprobs
        self.reason, self.stop_reason, self.error = event.finish_reason, event.stop_reason, event.error


class Desk:
    """One engine and the answers it gave. An answer stays unfinished when its request is aborted."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[str, Answer] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)
            self.answers[request.id] = Answer()

    def abort(self, request_id: str) -> bool:
        return self.engine.abort(request_id)

    def step(self) -> list[TokenEvent]:
        events = self.engine.step()
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert all(0 <= used <= total for used, total in zip(stats.pages_used, stats.pages_total, strict=True))
        for event in events:
            self.answers[event.request_id].take(event)
        return events

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Steps until ``until`` holds or nothing is left to do."""
        for _ in range(MOST_STEPS):
            if until() or not self.engine.has_work():
                return
            self.step()
        raise AssertionError(f"still working after {MOST_STEPS} steps: {self.engine.stats()}")

    def finish(self) -> None:
        """Runs to the end; then nothing may be held."""
        self.run()
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, sum(stats.pages_used)) == (0, 0, 0)


_numbers = itertools.count()


def request(prompt: Iterable[int], *, priority: int = 0, id: str | None = None, **sampling: object) -> Request:
    return Request(id or f"r{next(_numbers)}", tuple(prompt), SamplingParams(**sampling), priority)


def random_ids(seed: int, length: int, vocab: int = 259) -> tuple[int, ...]:
    """Token ids past the three special ones."""
    return tuple(np.random.default_rng(seed).integers(3, vocab, length).tolist())


def alone(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """Each on an idle engine."""
    desk = Desk(engine)
    for r in requests:
        desk.add(r)
        desk.finish()
    return [desk.answers[r.id] for r in requests]


def among_others(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """All at once, behind and before others that prefill in chunks, sample at random and are penalised. The requests
    come last in priority; once they have begun, a rush of better ones takes pages away from them."""
    desk = Desk(engine)
    desk.add(
        request(random_ids(1, 70), temperature=1.5, max_tokens=25, logprobs=3, ignore_eos=True),
        *(dataclasses.replace(r, priority=9) for r in requests),
        request(random_ids(2, 3), temperature=0.8, top_k=5, repetition_penalty=1.3, max_tokens=9, priority=10),
    )
    mine = [desk.answers[r.id] for r in requests]
    desk.run(until=lambda: all(a.tokens or a.reason for a in mine))
    desk.add(
        request(random_ids(3, 100), priority=-1, max_tokens=12, prompt_logprobs=1, temperature=0),
        request(random_ids(4, 40), priority=-2, max_tokens=30, frequency_penalty=1.0, top_p=0.7, ignore_eos=True),
    )
    desk.finish()
    return mine
