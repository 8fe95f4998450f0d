"""Decode steps of a random model through the Runner's own compiled programs, as the engine dispatches them: the next
step is on its way before the last one's tokens are fetched.

Times of a dispatch of n steps, T(n), tell the device's time for one step, b = (T(MANY) - T(FEW)) / (MANY - FEW), and
what a dispatch of n steps costs beyond it, T(n) - n b: the host gap, in which the device waits for the host. All are
taken from the same context on: before each, the end of every prompt is prefilled once more, which sets the rows back.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxsqueeze.bench import random_model
from jaxsqueeze.bench.model_problems import problems
from jaxsqueeze.config import PREFILL_ROW, EngineConfig, KVDtypes
from jaxsqueeze.kv.pool import kv_bytes_per_page, storage
from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.runner.buckets import Buckets
from jaxsqueeze.runner.runner import Pending, Runner
from jaxsqueeze.sched import table_width
from jaxsqueeze.types import Admit, Chunk, GroupTables, Request, SamplingParams, StepPlan
from pallas_kernels import dispatch
from pallas_kernels.quant_matmul.problem import Format
from pallas_kernels.target import Target

MANY = 16  # steps of one dispatch
FEW = EngineConfig.decode_steps


@dataclasses.dataclass(frozen=True)
class Size:
    """``rows``: batch sizes to measure, the last is the largest; ``steps``: decoded for each figure and repeat."""

    rows: tuple[int, ...] = (1, 8, 64)
    prompt: int = 512
    steps: int = 96
    repeats: int = 3
    prefill_tokens: int = 2048  # of one step; a row of them for every slot

    @property
    def max_len(self) -> int:
        return self.prompt + self.steps + MANY


@dataclasses.dataclass(frozen=True)
class Figures:
    """Seconds per dispatch of 1, FEW and MANY steps (medians), and the largest relative spread of any of them.
    ``step_bytes``: weights, and keys and values of the rows, half way through the steps."""

    one: float
    few: float
    many: float
    spread: float
    step_bytes: float

    @property
    def step(self) -> float:
        """Device seconds of one step."""
        return (self.many - self.few) / (MANY - FEW)

    def gap(self, seconds: float, steps: int) -> float:
        """Share of a dispatch's time in which the device waits for the host."""
        return min(1.0, max(0.0, 1 - steps * self.step / seconds))


class Session:
    """A model in all slots, its prompts not yet prefilled."""

    def __init__(self, cfg: ModelConfig, format: Format | None, size: Size, dtype: str) -> None:
        (group,) = cfg.cache_groups()
        self.cfg, self.size, self._step = cfg, size, 0
        slots = size.rows[-1]
        self._format, self._dtype = format, dtype
        self._config = config = EngineConfig(
            model="", dtype=dtype, max_slots=slots, max_step_tokens=size.prefill_tokens, decode_steps=MANY
        )
        width = table_width(
            group,
            page_size=config.page_size,
            max_model_len=size.max_len,
            max_step_tokens=size.prefill_tokens,
            decode_steps=MANY,
        )
        self.params = random_model.make(cfg, jnp.dtype(dtype), format)
        kv = storage(KVDtypes(), jnp.dtype(dtype), jax.default_backend())
        self._runner = Runner(
            cfg,
            config,
            self.params,
            dtype=jnp.dtype(dtype),
            storage=kv,
            max_model_len=size.max_len,
            num_pages=(1 + slots * width,),
            table_widths=(width,),
            programs=None,
        )
        self._runner.buckets = Buckets(size.rows, ((size.rows[0], size.prefill_tokens // PREFILL_ROW),))
        table = np.zeros((slots + 1, width), np.int32)
        # Pages of a served model lie anywhere.
        ids = np.random.default_rng(0).permutation(np.arange(1, 1 + slots * width, dtype=np.int32))
        table[:slots] = ids.reshape(slots, width)
        self._tables = (GroupTables(table, np.zeros(slots + 1, np.int32)),)
        self._kv_bytes = kv_bytes_per_page(cfg, len(group.layers), 1, kv)

    def compile(self) -> float:
        """Seconds. Kernels are compiled first, in parallel: traced programs would ask for one after another."""
        begin = time.perf_counter()
        target = Target.of(jax.devices()[0])
        asked = problems(self.cfg, self._config, self._runner.buckets, self.size.max_len, self._format, self._dtype)
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda found: dispatch.choose(*found, target, True), asked))
        self._runner.warm_up()
        return time.perf_counter() - begin

    def prefill(self) -> float:
        """Fills every slot's prompt; tokens a second, admissions left out."""
        rng = np.random.default_rng(1)
        slots, n, row = self.size.rows[-1], self.size.prompt, self.size.prefill_tokens
        self._prompts = prompts = rng.integers(0, self.cfg.vocab_size, (slots, n), np.int32)
        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        admits = tuple(
            Admit(i, Request(str(i), (), greedy), prompts[i], prompts[i, :0], (), max_len=2**30) for i in range(slots)
        )
        pieces = [
            Chunk(i, str(i), start, prompts[i, start : start + row], start + row >= n, False)
            for i in range(slots)
            for start in range(0, n, row)
        ]
        each = max(1, row // n)
        steps = [tuple(pieces[i : i + each]) for i in range(0, len(pieces), each)]
        self._run(self._plan((), 1, steps[0], admits)).result()
        begin = time.perf_counter()
        for chunks in steps[1:]:
            pending = self._run(self._plan((), 1, chunks))
        if len(steps) > 1:
            pending.result()
        seconds = time.perf_counter() - begin
        rest = slots * n - sum(len(c.token_ids) for c in steps[0])
        return rest / seconds

    def decode(self, rows: int) -> Figures:
        """Of a batch of the first ``rows`` slots."""
        self.steps(rows, MANY)  # warms up
        times: dict[int, list[float]] = {FEW: [], MANY: [], 1: []}
        for _ in range(self.size.repeats):
            for steps, seconds in times.items():
                seconds.append(self._dispatch(rows, steps))
        few, many, one = (statistics.median(x) for x in times.values())
        spread = max((max(x) - min(x)) / statistics.median(x) for x in times.values())
        tokens = rows * (self.size.prompt + self.size.steps / 2)
        return Figures(one, few, many, spread, random_model.step_bytes(self.params) + tokens * self._kv_bytes)

    def steps(self, rows: int, steps: int) -> None:
        """One dispatch from the prompts' ends on, waited for."""
        self._rewind(rows)
        self._run(self._plan(range(rows), steps)).result()

    def _rewind(self, rows: int) -> None:
        n = self.size.prompt
        start = n - min(n, PREFILL_ROW)
        ends = tuple(Chunk(i, str(i), start, self._prompts[i, start:], True, False) for i in range(rows))
        self._run(self._plan((), 1, ends)).result()

    def _dispatch(self, rows: int, steps: int) -> float:
        """Seconds per dispatch of ``steps`` steps, as the engine makes them."""
        self._rewind(rows)
        dispatches = max(2, self.size.steps // steps)
        previous = None
        begin = time.perf_counter()
        for _ in range(dispatches):
            pending = self._run(self._plan(range(rows), steps))
            if previous:
                previous.result()
            previous = pending
        tokens = previous.result().decode_tokens
        seconds = time.perf_counter() - begin
        if (tokens < 0).any():
            raise RuntimeError(f"the model gave no finite logits, or ended early: tokens {tokens[:, :8]}")
        return seconds / dispatches

    def _plan(
        self, slots: range | tuple[()], steps: int, chunks: tuple[Chunk, ...] = (), admits: tuple[Admit, ...] = ()
    ) -> StepPlan:
        decode = np.asarray(slots, np.int32)
        names = tuple(str(i) for i in slots)
        context = np.full(len(slots), self.size.prompt, np.int32)  # the runner does not look
        return StepPlan(self._step, admits, chunks, decode, names, context, steps, self._tables)

    def _run(self, plan: StepPlan) -> Pending:
        self._step += 1
        return self._runner.run(plan)
