"""An engine whose tokens are written down: for what a real model cannot be made to do on demand (an exact token
sequence, an exception in a step, a step that takes long).

The script of a request is chosen by its prompt's text: ``scripts[text]`` is a list of steps, each a tuple of token ids.
Everything else echoes the prompt's own ids, one a step. Like the real engine it ends a request at EOS, at stop ids, at
``max_tokens`` and at ``max_model_len``.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from jaxsqueeze.checkpoint.manifest import Manifest
from jaxsqueeze.config import EngineConfig
from jaxsqueeze.sched import SchedulerStats
from jaxsqueeze.text.tokenizer import Tokenizer
from jaxsqueeze.types import FinishReason, Logprob, Request, RequestRefused, TokenEvent


@dataclasses.dataclass
class FakeModelConfig:
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclasses.dataclass
class _Running:
    request: Request
    steps: list[tuple[int, ...]]
    output: list[int] = dataclasses.field(default_factory=list)
    scored: bool = False


class StepFault(RuntimeError):
    def __init__(self, message: str, request_ids: tuple[str, ...]) -> None:
        super().__init__(message)
        self.request_ids = request_ids


class ScriptedEngine:
    def __init__(self, tokenizer: Tokenizer, max_model_len: int = 128, slots: int = 4, pages: int = 64) -> None:
        self.config = EngineConfig()
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.model_config = FakeModelConfig(tokenizer.vocab_size, (tokenizer.eos_token_id,))
        self.manifest = Manifest(
            config=self.model_config,
            dtype="bfloat16",
            schemes={},
            quantisation="none",
            source="scripted",
            source_hash="",
            units=(),
            files={},
            versions={},
        )
        self.ledger = "ledger: scripted"
        self.scripts: dict[str, list[tuple[int, ...]]] = {}
        self.before_step: Callable[[list[Request]], None] = lambda requests: None
        self.before_add: Callable[[Request], None] = lambda request: None
        self.before_stats: Callable[[], None] = lambda: None
        self.step_seconds = 0.0
        self.steps = 0
        self.failed_steps = 0
        self.compiles_since_ready = 0
        self.threads: set[int] = set()
        self.aborted: list[str] = []
        self.seen: list[Request] = []
        self._slots, self._pages = slots, pages
        self._running: dict[str, _Running] = {}
        self._waiting: dict[str, _Running] = {}

    def add(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        self.before_add(request)
        if len(request.prompt_ids) > 16 * self._pages:
            raise RequestRefused("the KV pool is too small")
        if not request.prompt_ids or len(request.prompt_ids) >= self.max_model_len:
            raise RequestRefused("prompt length")
        self.seen.append(request)
        text = self.tokenizer.decode(request.prompt_ids)
        steps = self.scripts.get(text) or [(i,) for i in request.prompt_ids] * 200
        self._waiting[request.id] = _Running(request, list(steps))

    def abort(self, request_id: str) -> None:
        self.threads.add(threading.get_ident())
        if self._running.pop(request_id, None) or self._waiting.pop(request_id, None):
            self.aborted.append(request_id)

    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def step(self) -> list[TokenEvent]:
        self.threads.add(threading.get_ident())
        self.steps += 1
        while self._waiting and len(self._running) < self._slots:
            request_id = next(iter(self._waiting))
            self._running[request_id] = self._waiting.pop(request_id)
        self.before_step([r.request for r in self._running.values()])
        if self.step_seconds:
            time.sleep(self.step_seconds)
        events = [self._advance(r) for r in list(self._running.values())]
        for event in events:
            if event.finish_reason:
                del self._running[event.request_id]
        return events

    def _advance(self, running: _Running) -> TokenEvent:
        request, sampling = running.request, running.request.sampling
        room = self.max_model_len - len(request.prompt_ids) - len(running.output)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens - len(running.output))
        step = running.steps.pop(0) if running.steps else (self.tokenizer.eos_token_id,)
        tokens: list[int] = []
        reason, stop_reason = None, None
        for token in step[:limit]:
            tokens.append(token)
            if token in self.model_config.eos_token_ids and not sampling.ignore_eos:
                reason = FinishReason.STOP
            elif token in sampling.stop_token_ids:
                reason, stop_reason = FinishReason.STOP, token
            if reason:
                break
        running.output += tokens
        if reason is None and len(tokens) == limit:
            reason = FinishReason.LENGTH
        scores = None
        if sampling.prompt_logprobs is not None and not running.scored:
            running.scored = True
            scores = (None, *(self.score(i, sampling.prompt_logprobs) for i in request.prompt_ids[1:]))
        logprobs = None if sampling.logprobs is None else tuple(self.score(t, sampling.logprobs) for t in tokens)
        return TokenEvent(request.id, tuple(tokens), logprobs, scores, reason, stop_reason, num_cached_tokens=1)

    def score(self, token: int, top: int) -> Logprob:
        """Log-probability -token/1000; the alternatives include one that is impossible."""
        others = tuple((i, float("-inf") if i == 7 else -i / 1000) for i in range(7, 7 + top))
        return Logprob(token, -token / 1000, 1, others)

    def stats(self) -> SchedulerStats:
        self.before_stats()
        running, waiting = len(self._running), len(self._waiting)
        return SchedulerStats(running, waiting, 0, (self._pages,), (2 * running,), (24 * running,), (8 * running,))
