"""Offline batch API: ``LLM(model).generate(prompts, params)`` and ``.chat(conversations, params)``."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress

from jaxsqueeze.checkpoint.progress import progress_bars
from jaxsqueeze.checkpoint.source import quiet
from jaxsqueeze.config import EngineConfig
from jaxsqueeze.engine import Engine
from jaxsqueeze.text.chat import ChatTemplate
from jaxsqueeze.text.stream import ChoiceStream, Delta
from jaxsqueeze.types import FinishReason, Logprob, Request, SamplingParams, TokenEvent, split_choices

Prompt = str | Sequence[int]
Message = dict[str, Any]
DEFAULTS = SamplingParams()


@dataclasses.dataclass(frozen=True)
class Choice:
    """One finished answer. ``error`` is set when the engine could not finish it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Generation:
    """A prompt and its choices (``sampling.n`` of them)."""

    prompt_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[Logprob | None, ...] | None = None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


class LLM:
    """An engine for batches. ``options`` are EngineConfig fields; ``progress`` shows bars on a terminal."""

    def __init__(self, model: str = "demo", *, progress: bool = True, **options: Any) -> None:
        self._progress = progress
        self._ids = itertools.count()
        with progress_bars() if progress else contextlib.nullcontext(quiet) as report:
            self.engine = Engine(EngineConfig(model=model, **options), report)
            self.engine.warm_up(lambda done, total: report("compiling", done, total))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = DEFAULTS
    ) -> list[Generation]:
        """Completes texts or token-id lists, in the order given; ``params`` for all, or one for each.

        Raises RequestRefused, with nothing run, if one of them can never run.
        """
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        encode = self.engine.tokenizer.encode
        return self._run([tuple(encode(p) if isinstance(p, str) else p) for p in prompts], params, continues=True)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] = DEFAULTS,
        **options: Any,
    ) -> list[Generation]:
        """Answers conversations (lists of ``{"role", "content"}``) through the model's chat template; ``options`` as
        for ``ChatTemplate.render``."""
        if conversations and isinstance(conversations[0], dict):
            conversations = [conversations]
        if not conversations:
            return []
        tokenizer = self.engine.tokenizer
        template = ChatTemplate.of(tokenizer)
        texts = [template.render(c, **options) for c in conversations]
        ids = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        return self._run(ids, params, continues=options.get("continue_final_message", False))

    def _run(self, prompts: list[tuple[int, ...]], params: Any, continues: bool) -> list[Generation]:
        params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} params for {len(prompts)} prompts; give one for all or one for each")
        answers = [
            _Answer(ids, p, self.engine, continues, next(self._ids)) for ids, p in zip(prompts, params, strict=True)
        ]
        pending = {request.id: (answer, i) for answer in answers for i, request in enumerate(answer.requests)}
        added = []
        try:
            for answer in answers:
                for request in answer.requests:
                    self.engine.add(request)
                    added.append(request.id)
            with self._bar(len(pending)) as advance:
                while pending:
                    for event in self.engine.step():
                        answer, index = pending.get(event.request_id, (None, 0))
                        if answer and answer.push(index, event):
                            del pending[event.request_id]
                            self.engine.abort(event.request_id)  # a stop string ends it only here
                            advance()
        except BaseException:
            for request_id in added:
                self.engine.abort(request_id)
            raise
        return [answer.generation() for answer in answers]

    @contextlib.contextmanager
    def _bar(self, total: int) -> Iterator[Callable[[], None]]:
        console = Console(stderr=True)
        with Progress(console=console, disable=not (self._progress and console.is_terminal)) as bar:
            task = bar.add_task("generating", total=total)
            yield lambda: bar.advance(task)


class _Answer:
    """Collects the events of one prompt's choices."""

    def __init__(
        self, ids: tuple[int, ...], params: SamplingParams, engine: Engine, continues: bool, number: int
    ) -> None:
        self._ids = ids
        self.requests = split_choices(Request(f"llm-{number}", ids, params))
        context = ids if continues else ()
        self._streams = [ChoiceStream(engine.tokenizer, params, context) for _ in self.requests]
        self._deltas: list[list[Delta]] = [[] for _ in self.requests]
        self._errors: list[str | None] = [None] * len(self.requests)
        self._prompt_logprobs: tuple[Logprob | None, ...] | None = None

    def push(self, index: int, event: TokenEvent) -> bool:
        """Takes an event; True when the choice has ended."""
        delta = self._streams[index].push(event)
        self._deltas[index].append(delta)
        self._errors[index] = event.error
        self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs
        return delta.finish_reason is not None

    def generation(self) -> Generation:
        return Generation(self._ids, tuple(map(self._choice, range(len(self.requests)))), self._prompt_logprobs)

    def _choice(self, index: int) -> Choice:
        deltas = self._deltas[index]
        logprobs = None
        if deltas[0].logprobs is not None:
            logprobs = tuple(x for d in deltas for x in d.logprobs or ())
        return Choice(
            index=index,
            text="".join(d.text for d in deltas),
            token_ids=tuple(t for d in deltas for t in d.token_ids),
            logprobs=logprobs,
            finish_reason=deltas[-1].finish_reason,
            stop_reason=deltas[-1].stop_reason,
            error=self._errors[index],
        )
