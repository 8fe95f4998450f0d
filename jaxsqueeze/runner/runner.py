"""Runs step plans on the device: the only place that jits and donates.

``run`` pads a plan to a bucket, calls a program compiled ahead, and returns at once; ``Pending.result`` waits for the
tokens. Pool and slot state stay on the device and are donated from step to step, so the step after next can be
dispatched before the last one's tokens are known.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsqueeze.config import PREFILL_ROW, EngineConfig
from jaxsqueeze.kv.pool import KVPool, Storage, abstract_pool, allocate
from jaxsqueeze.models.attention import GroupPages
from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.decoder import Decoder, Params
from jaxsqueeze.runner import host_memory
from jaxsqueeze.runner import state as slot_state
from jaxsqueeze.runner.buckets import decode_sizes, make_buckets
from jaxsqueeze.runner.program_store import ProgramStore
from jaxsqueeze.runner.sampling import Logprobs
from jaxsqueeze.runner.steps import DecodeInputs, PrefillInputs, StepResult, decode_n, mixed
from jaxsqueeze.runner.views import with_views
from jaxsqueeze.types import Chunk, GroupTables, LogprobArrays, StepOutput, StepPlan
from pallas_kernels.target import Target

Key = tuple[str, int, int]  # program, decode rows, prefill rows


class Runner:
    """One model on one device. ``num_pages``: per cache group, page 0 included; ``table_widths``: columns of each
    group's page table; ``programs``: folder that keeps the compiled programs."""

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        params: Params,
        *,
        dtype: jnp.dtype,
        storage: Storage,
        max_model_len: int,
        num_pages: tuple[int, ...],
        table_widths: tuple[int, ...],
        programs: Path | None,
    ) -> None:
        self._config, self._model_config = config, model_config
        self._max_model_len, self._widths = max_model_len, table_widths
        self._trash = config.max_slots
        platform = jax.default_backend()
        self.buckets = make_buckets(config, decode_sizes(config.max_slots, platform, jnp.dtype(dtype).name))
        self._variables = with_views(params)
        self._model = Decoder(model_config, jnp.dtype(dtype), max_model_len, Target.of(jax.devices()[0]))
        self._abstract_pool = abstract_pool(model_config, num_pages, config.page_size, storage)
        weights = jax.tree.map(jax.typeof, self._variables)
        settings = dataclasses.replace(config, model="", seed=0)
        facts = model_config, settings, dtype, max_model_len, self._abstract_pool, weights
        self._store = ProgramStore(programs, *facts, table_widths)
        self._programs: dict[Key, Callable[..., Any]] = {}
        self._wants_logprobs = np.zeros(config.max_slots + 1, bool)
        self.temp_bytes = 0  # the largest program's own buffers, known after warm_up
        self.reset()

    def reset(self) -> None:
        """Empty pool and slots: at the start, and after a step whose donated buffers are lost."""
        self._pool = self._slot_params = self._state = None  # freed first: the device may not hold two pools
        self._pool: KVPool = allocate(self._abstract_pool)
        self._slot_params, self._state = slot_state.initial_state(self._config.max_slots, self._model_config.vocab_size)

    # Compiling

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Loads or compiles every program; ``progress(done, total)`` after each."""
        keys = self._keys()
        progress(0, len(keys))
        with ThreadPoolExecutor() as threads:
            kept = {key: threads.submit(self._store.load, _name(key)) for key in keys}
            # Tracing holds the interpreter; compiling does not, and starts as soon as a program is lowered.
            built = {
                key: threads.submit(self._build, key, self._lower(key))
                for key, load in kept.items()
                if load.result() is None
            }
            for done, key in enumerate(keys, start=1):
                self._programs[key] = program = (built.get(key) or kept[key]).result()
                self.temp_bytes = max(self.temp_bytes, program.memory_analysis().temp_size_in_bytes)
                progress(done, len(keys))
        if built:
            self._store.prune()
        host_memory.trim()

    def _build(self, key: Key, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        program = lowered.compile()
        self._store.save(_name(key), program)
        return program

    def largest_step_bytes(self) -> int:
        """Buffers of the largest step, compiled for it."""
        key = max(self._keys(), key=lambda k: (k[2], k[1]))
        return self._lower(key).compile().memory_analysis().temp_size_in_bytes

    def _keys(self) -> list[Key]:
        """Those that take longest to compile or load come first, so that no thread is left with one at the end."""
        b = self.buckets
        first, *others = [("decode", rows, 0) for rows in b.decode]
        return [first, *(("mixed", rows, prefill) for rows, prefill in b.mixed[::-1]), *others, ("admit", 0, 0)]

    def _lower(self, key: Key) -> jax.stages.Lowered:
        name, rows, prefill_rows = key
        device = self._variables, self._pool, self._state, self._slot_params
        if name == "admit":
            row = slot_state.blank_row(self._model_config.vocab_size, self._max_model_len)
            return jax.jit(slot_state.admit, donate_argnums=(0, 1)).lower(self._slot_params, self._state, row)
        decode = self._decode_inputs(np.empty(0, np.int32), 1, rows, self._empty_tables())
        if name == "decode":
            step = functools.partial(decode_n, self._model, self._config.decode_steps)
            return jax.jit(step, donate_argnums=(1, 2)).lower(*device, decode)
        step = functools.partial(mixed, self._model)
        prefill, _ = self._prefill_inputs((), self._empty_tables(), prefill_rows)
        return jax.jit(step, donate_argnums=(1, 2)).lower(*device, decode, prefill)

    def _empty_tables(self) -> tuple[GroupTables, ...]:
        n = self._trash + 1
        return tuple(GroupTables(np.zeros((n, w), np.int32), np.zeros(n, np.int32)) for w in self._widths)

    # Running

    def run(self, plan: StepPlan) -> Pending:
        """Dispatches the plan's programs. Raises RuntimeError of the device runtime; then call ``reset``."""
        for admit in plan.admits:
            row = slot_state.admit_row(admit, self._model_config.vocab_size, self._max_model_len)
            self._slot_params, self._state = self._programs["admit", 0, 0](self._slot_params, self._state, row)
            self._wants_logprobs[admit.slot] = admit.request.sampling.logprobs is not None
        slots = plan.decode_slots
        if not plan.chunks:
            result = self._decode(slots, plan.num_steps, plan.tables)
            return self._pending(plan, result, result, [])
        if not self._config.deterministic:
            result, ends = self._mixed(plan, slots)
            return self._pending(plan, result, result, ends)
        # Deterministic: a decoded token comes from the same program whoever is being prefilled.
        prefill, ends = self._mixed(plan, slots[:0])
        decode = self._decode(slots, 1, plan.tables) if len(slots) else prefill
        return self._pending(plan, decode, prefill, ends)

    def _decode(self, slots: np.ndarray, num_steps: int, tables: tuple[GroupTables, ...]) -> StepResult:
        rows = self.buckets.pick_decode(len(slots))
        return self._call(("decode", rows, 0), self._decode_inputs(slots, num_steps, rows, tables))

    def _mixed(self, plan: StepPlan, slots: np.ndarray) -> tuple[StepResult, list[_ChunkRows]]:
        need = sum(-(-len(chunk.token_ids) // PREFILL_ROW) for chunk in plan.chunks)
        rows, prefill_rows = self.buckets.pick_mixed(len(slots), need)
        decode = self._decode_inputs(slots, 1, rows, plan.tables)
        prefill, ends = self._prefill_inputs(plan.chunks, plan.tables, prefill_rows)
        return self._call(("mixed", rows, prefill_rows), decode, prefill), ends

    def _call(self, key: Key, *inputs: Any) -> StepResult:
        self._pool, self._state, result = self._programs[key](
            self._variables, self._pool, self._state, self._slot_params, *inputs
        )
        return result

    def _decode_inputs(
        self, slots: np.ndarray, num_steps: int, rows: int, tables: tuple[GroupTables, ...]
    ) -> DecodeInputs:
        padded = np.full(rows, self._trash, np.int32)
        padded[: len(slots)] = slots
        return DecodeInputs(padded, _pages(tables, padded), np.int32(num_steps))

    def _prefill_inputs(
        self, chunks: Sequence[Chunk], tables: tuple[GroupTables, ...], rows: int
    ) -> tuple[PrefillInputs, list[_ChunkRows]]:
        shape = (rows, PREFILL_ROW)
        tokens, targets = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        positions = np.full(shape, -1, np.int32)
        owners = np.full(rows, self._trash, np.int32)
        samplers, sample_at = owners.copy(), np.zeros(rows, np.int32)
        spans, row = [], 0
        for chunk in chunks:
            n = len(chunk.token_ids)
            first = row * PREFILL_ROW
            flat = slice(first, first + n)
            tokens.reshape(-1)[flat] = chunk.token_ids
            positions.reshape(-1)[flat] = np.arange(chunk.start, chunk.start + n)
            if chunk.prompt_logprobs:
                targets.reshape(-1)[flat] = [*chunk.token_ids[1:], max(chunk.next_token, 0)]
            end = row + -(-n // PREFILL_ROW)
            owners[row:end] = chunk.slot
            if chunk.sample:
                samplers[end - 1], sample_at[end - 1] = chunk.slot, (n - 1) % PREFILL_ROW
            spans.append(_ChunkRows(end - 1, flat, chunk.prompt_logprobs, bool(self._wants_logprobs[chunk.slot])))
            row = end
        return PrefillInputs(tokens, positions, _pages(tables, owners), samplers, sample_at, targets), spans

    def _pending(self, plan: StepPlan, decode: StepResult, prefill: StepResult, chunks: list[_ChunkRows]) -> Pending:
        logprobs = bool(self._wants_logprobs[plan.decode_slots].any())
        return Pending(plan, decode, prefill, tuple(chunks), logprobs)


@dataclasses.dataclass(frozen=True)
class _ChunkRows:
    """Where a chunk lies among the prefill rows."""

    last_row: int
    flat: slice
    scored: bool
    logprobs: bool


def _name(key: Key) -> str:
    return "-".join(map(str, key))


def _pages(tables: tuple[GroupTables, ...], slots: np.ndarray) -> tuple[GroupPages, ...]:
    return tuple(GroupPages(t.table[slots], t.base[slots]) for t in tables)


@dataclasses.dataclass(frozen=True)
class Pending:
    """A dispatched step."""

    plan: StepPlan
    _decode: StepResult
    _prefill: StepResult
    _chunks: tuple[_ChunkRows, ...]
    _wants_logprobs: bool

    def ready(self) -> bool:
        """Whether the device has finished the step."""
        return all(a.is_ready() for a in self._tokens())

    def _tokens(self) -> Iterator[jax.Array]:
        yield self._decode.decode_tokens
        if self._chunks:
            yield self._prefill.prefill_tokens

    def result(self) -> StepOutput:
        """Waits for the device and fetches what the plan's requests asked for."""
        rows = len(self.plan.decode_slots)
        tokens = np.asarray(self._decode.decode_tokens)[: self.plan.num_steps, :rows]
        last = [c.last_row for c in self._chunks]
        sampled = np.empty(0, np.int32)
        chunk_logprobs = None
        scores: tuple[LogprobArrays | None, ...] = ()
        if self._chunks:
            sampled = np.asarray(self._prefill.prefill_tokens)[last]
            if any(c.logprobs for c in self._chunks):
                chunk_logprobs = _host(self._prefill.prefill_logprobs, lambda a: a[last])
            scores = tuple(self._scores(c) for c in self._chunks)
        decode_logprobs = None
        if self._wants_logprobs:
            decode_logprobs = _host(self._decode.decode_logprobs, lambda a: a[: self.plan.num_steps, :rows])
        return StepOutput(self.plan.step_id, tokens, sampled, decode_logprobs, chunk_logprobs, scores)

    def _scores(self, chunk: _ChunkRows) -> LogprobArrays | None:
        if not chunk.scored:
            return None
        return _host(self._prefill.prompt_logprobs, lambda a: a.reshape(-1, *a.shape[2:])[chunk.flat])


def _host(logprobs: Logprobs, select: Callable[[np.ndarray], np.ndarray]) -> LogprobArrays:
    parts = (logprobs.token, logprobs.rank, logprobs.top_ids, logprobs.top)
    return LogprobArrays(*(select(np.asarray(part)) for part in parts))
