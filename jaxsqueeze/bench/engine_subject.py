"""The engine as a measured program (see ``worker``): fixed batches, and replays of a whole trace.

Outputs always have their full length (EOS ignored) and are greedy, so every repeat does the same work.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxsqueeze.bench.phases import Emission, phases
from jaxsqueeze.checkpoint.manifest import is_converted, read_manifest
from jaxsqueeze.checkpoint.progress import progress_bars
from jaxsqueeze.checkpoint.resolve import resolve
from jaxsqueeze.config import EngineConfig
from jaxsqueeze.engine import Engine
from jaxsqueeze.types import Request, SamplingParams, TokenEvent


class EngineSubject:
    """One engine, warmed up. Everything that goes in or out is plain JSON."""

    def __init__(self) -> None:
        self._ids = itertools.count()

    def open(self, **config: Any) -> dict[str, Any]:
        """Builds the engine (fields of ``EngineConfig``) and compiles everything; ``warm_up_s`` covers both."""
        begin = time.perf_counter()
        with progress_bars() as report:
            self._engine = engine = Engine(EngineConfig(**config), report)
            engine.warm_up(lambda done, total: report("compiling", done, total))
        return {
            "name": "jaxsqueeze",
            "dtype": engine.config.dtype,
            "vocab_size": engine.model_config.vocab_size,
            "max_model_len": engine.max_model_len,
            "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "warm_up_s": time.perf_counter() - begin,
        }

    def peer_source(self, model: str) -> str:
        """Where another program finds the weights that ``model`` names. Raises ValueError with a cure."""
        folder = Path(model).expanduser()
        origin = read_manifest(folder).source if is_converted(folder) else model
        try:
            return str(resolve(origin).open().path)
        except ValueError as error:
            if origin == model:
                raise
            raise ValueError(f"{model} was converted from {origin}: {error}; or give --peer-model") from error

    def batch(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """All prompts at once, equal lengths; the phases' speeds and the host's share of step time."""
        requests = [self._request(ids, output_tokens) for ids in prompts]
        rows = {request.id: row for row, request in enumerate(requests)}
        emissions: list[Emission] = []
        host = _Host(self._engine)
        begin = time.perf_counter()
        for event in self._run(requests):
            time_s = time.perf_counter() - begin
            ended = event.finish_reason is not None
            emissions.append(Emission(time_s, rows[event.request_id], len(event.token_ids), ended))
        return {**phases(emissions, len(prompts), len(prompts[0])), **host.shares()}

    def replay(
        self, requests: list[tuple[list[int], int]], group: int | None, padded: bool, watch: bool
    ) -> dict[str, Any]:
        """All requests queued at once; with ``group`` that many at a time, the next when all of them have ended, and
        with ``padded`` their prompts filled up to the group's longest.

        ``watch``: look at the pages after every step (and report no speed that counts).
        """
        size = group or len(requests)
        waste: list[float] = []
        output = 0
        host = _Host(self._engine)
        begin = time.perf_counter()
        for first in range(0, len(requests), size):
            batch = requests[first : first + size]
            longest = max(len(ids) for ids, _ in batch) if padded else 0
            made = [self._request(self._filled(ids, longest, n), n) for ids, n in batch]
            for event in self._run(made, waste if watch else None):
                output += len(event.token_ids)
        seconds = time.perf_counter() - begin
        wanted = sum(n for _, n in requests)
        if output != wanted:
            raise RuntimeError(f"the engine delivered {output} tokens of {wanted}")
        prompt = sum(len(ids) for ids, _ in requests)
        return {
            "seconds": seconds,
            "steps": host.steps,
            "output_tokens_per_s": output / seconds,
            "total_tokens_per_s": (prompt + output) / seconds,
            **host.shares(),
            **({"page_tail_waste": sum(waste) / len(waste)} if watch else {}),
        }

    def _filled(self, ids: list[int], length: int, output: int) -> list[int]:
        """The prompt behind as many padding tokens as bring it to ``length``, if the output still fits then."""
        return [0] * (min(length, self._engine.max_model_len - output) - len(ids)) + ids

    def start_profile(self, directory: str) -> None:
        """Everything until ``stop_profile`` goes into a trace under ``directory``."""
        jax.profiler.start_trace(directory, create_perfetto_trace=True)

    def stop_profile(self) -> None:
        """Writes the trace."""
        jax.profiler.stop_trace()

    def _request(self, prompt: Sequence[int], output_tokens: int) -> Request:
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        return Request(f"bench-{next(self._ids)}", tuple(prompt), sampling, arrival=time.monotonic())

    def _run(self, requests: Sequence[Request], waste: list[float] | None = None) -> Iterator[TokenEvent]:
        """Adds the requests and steps until the engine is idle; notes the page-tail waste after each step that leaves
        something in the pool. Raises RuntimeError if a request fails."""
        for request in requests:
            self._engine.add(request)
        while self._engine.has_work():
            for event in self._engine.step():
                if event.error:
                    raise RuntimeError(f"request {event.request_id} failed: {event.error}")
                yield event
            if waste is not None and any((stats := self._engine.stats()).live_tokens):
                waste.append(stats.page_tail_waste)


class _Host:
    """What the engine's own clock says about a stretch of steps, as shares of the time spent in them.

    ``exposed``: the host worked and the device had nothing to do. ``busy``: the host worked at all; most of that hides
    behind a running step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begin = dataclasses.replace(engine.timings)

    def shares(self) -> dict[str, float]:
        now, begin = self._engine.timings, self._begin
        total = now.total - begin.total
        return {
            "host_exposed_share": (now.exposed - begin.exposed) / total,
            "host_busy_share": (now.host - begin.host) / total,
        }

    @property
    def steps(self) -> int:
        return self._engine.timings.steps - self._begin.steps
