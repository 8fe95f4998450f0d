"""The engine: where the host tower (scheduler) and the device tower (runner) meet, and nowhere else.

One request, there and back: ``Request`` -> ``Engine.add`` -> the scheduler's ``Seq`` -> ``Scheduler.plan() ->
StepPlan`` (all pages reserved) -> ``Runner.run(plan) -> StepOutput`` (pads to a bucket, calls a compiled step that
donates pool and state) -> ``Scheduler.commit(plan, out) -> [TokenEvent]`` -> incremental detokeniser (text/stream.py)
-> SSE chunk.

``step`` plans and dispatches step N+1 before it waits for step N, so the device goes on while the host works.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxsqueeze.checkpoint.demo import cache_folder
from jaxsqueeze.checkpoint.ensure import ensure_converted
from jaxsqueeze.checkpoint.manifest import read_manifest
from jaxsqueeze.checkpoint.source import Report, quiet
from jaxsqueeze.checkpoint.store import load_params
from jaxsqueeze.config import PREFILL_ROW, EngineConfig, KVDtypes
from jaxsqueeze.kv.pool import storage as kv_storage
from jaxsqueeze.kv.sizing import default_kv_bytes, size_pool
from jaxsqueeze.report.ledger import GroupLedger, Ledger
from jaxsqueeze.runner.compiles import CompileCounter
from jaxsqueeze.runner.runner import Pending, Runner
from jaxsqueeze.sched import Scheduler, SchedulerStats, table_width
from jaxsqueeze.text.tokenizer import Tokenizer
from jaxsqueeze.types import Request, StepPlan, TokenEvent

log = logging.getLogger(__name__)

DEFAULT_MAX_MODEL_LEN = 4096


@dataclasses.dataclass
class Timings:
    """Seconds since the start, over all steps. ``exposed``: host time during which the device had nothing to do."""

    steps: int = 0
    total: float = 0.0  # time in steps
    host: float = 0.0  # planning, dispatching, committing
    exposed: float = 0.0


class Engine:
    """Loads a model and runs requests on it. Not thread-safe: one thread calls everything.

    ``warm_up`` compiles all programs and must run before the first ``step``.
    """

    def __init__(self, config: EngineConfig, report: Report = quiet) -> None:
        folder = ensure_converted(config.model, "float32" if config.dtype == "float32" else "bfloat16", report)
        self.manifest = manifest = read_manifest(folder)
        self.model_config = cfg = manifest.config
        self.config = config = dataclasses.replace(
            config, dtype=manifest.dtype if config.dtype == "auto" else config.dtype
        )
        self.tokenizer = Tokenizer.load(folder)
        self.max_model_len = config.max_model_len or min(cfg.max_position, DEFAULT_MAX_MODEL_LEN)
        if self.max_model_len > cfg.max_position:
            log.warning("max_model_len %d is past the %d of the checkpoint", self.max_model_len, cfg.max_position)
        params = load_params(folder, cfg, dtype=config.dtype, report=report)

        groups, dtype = cfg.cache_groups(), jnp.dtype(config.dtype)
        widths = tuple(
            table_width(
                group,
                page_size=config.page_size,
                max_model_len=self.max_model_len,
                max_step_tokens=config.max_step_tokens,
                decode_steps=config.decode_steps,
            )
            for group in groups
        )
        storage = kv_storage(KVDtypes.parse(config.kv_dtype), dtype, jax.default_backend())

        def runner(num_pages: tuple[int, ...]) -> Runner:
            return Runner(
                cfg,
                config,
                params,
                dtype=dtype,
                storage=storage,
                max_model_len=self.max_model_len,
                num_pages=num_pages,
                table_widths=widths,
                programs=_programs_folder(),
            )

        kv_bytes = config.kv_bytes
        if kv_bytes is None:
            # A step's buffers do not depend on the pool's size: measured on the smallest pool.
            on_cpu = jax.default_backend() == "cpu"
            kv_bytes = default_kv_bytes(config, 0 if on_cpu else runner((2,) * len(groups)).largest_step_bytes())
        size = size_pool(cfg, widths, config.page_size, storage, kv_bytes)
        self._runner = runner(size.num_pages)
        self._scheduler = Scheduler(
            groups=groups,
            num_pages=size.num_pages,
            max_slots=config.max_slots,
            page_size=config.page_size,
            max_model_len=self.max_model_len,
            max_step_tokens=config.max_step_tokens,
            row_tokens=PREFILL_ROW,
            decode_steps=config.decode_steps,
            eos_token_ids=cfg.eos_token_ids,
            vocab_size=cfg.vocab_size,
            seed=config.seed,
            deterministic=config.deterministic,
        )
        self.ledger = Ledger(
            weight_bytes=sum(x.nbytes for x in jax.tree.leaves(params)),
            groups=tuple(
                GroupLedger(g.name, len(g.layers), pages - 1, (pages - 1) * config.page_size, pages * page_bytes)
                for g, pages, page_bytes in zip(groups, size.num_pages, size.page_bytes, strict=True)
            ),
            step_bytes=None,
            max_model_len=self.max_model_len,
            full_requests=size.full_requests,
        )
        self.timings = Timings()
        self.failed_steps = 0  # in a row, the latest ones
        self._inflight: tuple[StepPlan, Pending] | None = None
        self._compiles = CompileCounter()
        self._compiles_at_ready = 0

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles everything; ``progress(done, total)`` in programs. Nothing compiles after it."""
        self._runner.warm_up(progress)
        self.ledger = dataclasses.replace(self.ledger, step_bytes=self._runner.temp_bytes)
        self._compiles_at_ready = self._compiles.count

    @property
    def compiles_since_ready(self) -> int:
        """Compilations after warm-up: 0 unless something is wrong."""
        return self._compiles.count - self._compiles_at_ready

    def add(self, request: Request) -> None:
        """Queues a request (one choice). Raises RequestRefused if it can never run here."""
        self._scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """Ends a request without an event and frees what it holds; False if there is none of this id."""
        return self._scheduler.abort(request_id)

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    def step(self) -> list[TokenEvent]:
        """Dispatches the next step, then takes in the one before: its tokens, one event per request that got any.

        A step that fails ends its requests with an error event; the others go on.
        """
        start = time.perf_counter()
        previous, plan = self._inflight, self._scheduler.plan()
        idle = previous is None or previous[1].ready()
        failure: Exception | None = None
        self._inflight = None
        try:
            if plan:
                self._inflight = (plan, self._runner.run(plan))
        except Exception as error:  # the device runtime has no one type; handled once the step before is taken in
            failure = error
        dispatched = waited = time.perf_counter()
        events: list[TokenEvent] = []
        if previous:
            try:
                out = previous[1].result()
            except Exception as error:  # a step that failed while it ran tells so here
                return self._lost(error, [p for p in (previous[0], plan) if p])
            waited = time.perf_counter()
            self.failed_steps = 0
            events = self._scheduler.commit(previous[0], out)
        if failure and plan:
            return events + self._lost(failure, [plan])
        end = time.perf_counter()
        t = self.timings
        t.steps += plan is not None
        t.total += end - start
        t.host += end - start - (waited - dispatched)
        t.exposed += (dispatched - start if idle else 0.0) + (0.0 if plan else end - waited)
        return events

    def _lost(self, error: Exception, plans: list[StepPlan]) -> list[TokenEvent]:
        """Donated buffers are gone: everyone in a slot ends with an error, those who wait go on with a fresh pool."""
        log.error("a device step failed: %s", error, exc_info=error)
        self._inflight = None
        self.failed_steps += 1
        message = "the step failed on the device; the log has the details"
        events = [e for plan in plans for e in self._scheduler.discard(plan, message)]
        events += self._scheduler.fail_running("the device state of this request was lost with a failed step")
        self._runner.reset()
        return events


def _programs_folder() -> Path | None:
    """Where compiled programs are kept: JAXSQUEEZE_PROGRAMS, or the user's cache folder. None if jax's own persistent
    cache is set up: it keeps them then."""
    if jax.config.jax_compilation_cache_dir:
        return None
    override = os.environ.get("JAXSQUEEZE_PROGRAMS")
    return Path(override).expanduser() if override else cache_folder() / "programs"
