"""A device made of numpy, to test the scheduler against.

It runs plans in order, later than they were made. Each KV place of its pools remembers which admission wrote it, for
which position, with which token. A sampled token is a hash of the request's seed, the position and the tokens *read
through the page tables*, so a wrong page, a lost token or a foreign writer changes the output, besides failing the
assertions here. ``solo_run`` computes the same tokens from the request alone, without pages, slots or steps.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import deque
from collections.abc import Callable

import numpy as np

from jaxsqueeze.sched import Scheduler
from jaxsqueeze.types import (
    MAX_LOGPROBS,
    CacheGroup,
    Chunk,
    FinishReason,
    LogprobArrays,
    Request,
    StepOutput,
    StepPlan,
    TokenEvent,
)

VOCAB = 48
EOS = (1, 2)


def _hash(*parts: object) -> int:
    data = b"|".join(part.tobytes() if isinstance(part, np.ndarray) else str(part).encode() for part in parts)
    return zlib.crc32(data)


def visible_from(group: CacheGroup, query: int) -> int:
    """First position that a query sees."""
    return 0 if group.window is None else max(0, query - group.window + 1)


def next_token(seed: int | None, position: int, reads: list[np.ndarray], banned: tuple[int, ...]) -> int:
    for attempt in range(1000):
        token = _hash(seed, position, attempt, *reads) % VOCAB
        if token not in banned:
            return token
    raise AssertionError("every token is banned")


def score(reads: list[np.ndarray], token: int) -> tuple[float, int]:
    """A made-up log-probability (float32) and rank of ``token`` after what was read."""
    value = _hash("score", token, *reads)
    return float(np.float32(-(value % 1000) / 7)), 1 + value % VOCAB


def solo_run(
    request: Request, groups: tuple[CacheGroup, ...], max_len: int, eos: tuple[int, ...] = EOS
) -> tuple[list[int], FinishReason]:
    """Output tokens and finish reason of the request, alone in the world."""
    sampling = request.sampling
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))
    tokens, output = list(request.prompt_ids), []
    while len(tokens) < max_len:
        query = len(tokens) - 1
        reads = [np.asarray(tokens[visible_from(group, query) :], np.int32) for group in groups]
        early = len(output) < sampling.min_tokens
        token = next_token(sampling.seed, len(tokens), reads, tuple(stops) if early else ())
        tokens.append(token)
        output.append(token)
        if token in stops:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def prompt_scores(request: Request, groups: tuple[CacheGroup, ...]) -> list[tuple[float, int] | None]:
    tokens = request.prompt_ids
    scores: list[tuple[float, int] | None] = [None]
    for query in range(len(tokens) - 1):
        reads = [np.asarray(tokens[visible_from(group, query) : query + 1], np.int32) for group in groups]
        scores.append(score(reads, tokens[query + 1]))
    return scores


@dataclasses.dataclass
class _Row:
    """A slot's state on the device."""

    uid: int
    request: Request
    tokens: list[int]
    prompt: int
    max_len: int
    stop_ids: tuple[int, ...]
    written: int = 0
    ended: FinishReason | None = None


class FakeDevice:
    def __init__(self, groups: tuple[CacheGroup, ...], num_pages: tuple[int, ...], page_size: int) -> None:
        self.groups, self.page_size = groups, page_size
        # Per group and place: which admission, which position, which token.
        self.pools = [np.full((pages * page_size, 3), -1, np.int64) for pages in num_pages]
        self.rows: dict[int, _Row] = {}
        self.begin: dict[int, int] = {}  # per slot, first position of the step at hand
        self.plans: deque[StepPlan] = deque()
        self.poison: set[str] = set()  # ids of requests whose next logits are not finite
        self._uids = 0

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def run_next(self) -> tuple[StepPlan, StepOutput]:
        plan = self.plans.popleft()
        for tables in plan.tables:
            named = tables.table[tables.table > 0]
            assert len(np.unique(named)) == len(named), "a page is in two tables"
            assert not tables.table[-1].any(), "the trash slot has pages"
        for admit in plan.admits:
            self._uids += 1
            tokens = [*admit.prompt_ids.tolist(), *admit.output_ids.tolist()]
            assert admit.request.sampling.seed is not None
            self.rows[admit.slot] = _Row(
                self._uids, admit.request, tokens, len(admit.prompt_ids), admit.max_len, admit.stop_ids
            )
        slots = [chunk.slot for chunk in plan.chunks] + plan.decode_slots.tolist()
        assert len(set(slots)) == len(slots), "a slot is twice in a step"
        chunks = [self._run_chunk(plan, chunk) for chunk in plan.chunks]
        count = len(plan.decode_slots)
        tokens = np.full((plan.num_steps, count), -1, np.int32)
        scores = np.zeros((plan.num_steps, count, 2))
        assert plan.num_steps == 1 or not plan.chunks
        for b, slot in enumerate(plan.decode_slots.tolist()):
            row = self.rows[slot]
            assert row.request.id == plan.decode_request_ids[b]
            assert row.ended is not FinishReason.LENGTH, "a row is planned past its length"
            self.begin[slot] = row.written
            if row.ended is None:
                assert plan.decode_context[b] == row.written, "the plan's context is not what was written"
        for step in range(plan.num_steps):
            for b, slot in enumerate(plan.decode_slots.tolist()):
                row = self.rows[slot]
                if row.ended is None:
                    assert len(row.tokens) == row.written + 1
                    tokens[step, b], scores[step, b] = self._advance(plan, slot, 1, sample=True)
        no_logprobs = all(row.request.sampling.logprobs is None for row in self.rows.values())
        return plan, StepOutput(
            plan.step_id,
            tokens,
            np.asarray([token for token, _, _ in chunks], np.int32),
            None if no_logprobs else _logprob_arrays(scores),
            None if no_logprobs else _logprob_arrays(np.asarray([own for _, own, _ in chunks]).reshape(-1, 2)),
            tuple(prompt for _, _, prompt in chunks),
        )

    def _run_chunk(self, plan: StepPlan, chunk: Chunk) -> tuple[int, tuple[float, int], LogprobArrays | None]:
        row = self.rows[chunk.slot]
        end = chunk.start + len(chunk.token_ids)
        assert row.request.id == chunk.request_id
        assert row.ended is None
        assert chunk.start == row.written, "chunks of a sequence follow each other"
        assert len(chunk.token_ids) > 0
        self.begin[chunk.slot] = chunk.start
        assert chunk.token_ids.tolist() == row.tokens[chunk.start : end]
        assert chunk.sample == (end == len(row.tokens) < row.max_len)
        assert chunk.next_token == (row.tokens[end] if end < row.prompt else -1)
        token, own = self._advance(plan, chunk.slot, len(chunk.token_ids), chunk.sample)
        if not chunk.prompt_logprobs:
            return token, own, None
        scores = np.full((len(chunk.token_ids), 2), np.nan)
        for j in range(len(chunk.token_ids)):
            query = chunk.start + j
            if query + 1 < row.prompt:
                follower = chunk.next_token if j + 1 == len(chunk.token_ids) else int(chunk.token_ids[j + 1])
                scores[j] = score(self._read(plan, chunk.slot, query), follower)
        scores[np.isnan(scores[:, 1]), 1] = 0
        return token, own, _logprob_arrays(scores)

    def _advance(self, plan: StepPlan, slot: int, count: int, sample: bool) -> tuple[int, tuple[float, int]]:
        """Writes ``count`` tokens of a row, checks all that their queries see, and maybe samples the next one."""
        row = self.rows[slot]
        positions = np.arange(row.written, row.written + count)
        for index, group in enumerate(self.groups):
            first = visible_from(group, self.begin[slot]) // self.page_size
            assert plan.tables[index].base[slot] == first, "pages behind the window are kept, or too many given back"
        for index in range(len(self.groups)):
            places = self._places(plan, index, slot, positions)
            self.pools[index][places] = np.stack(
                [np.full(count, row.uid), positions, np.asarray(row.tokens)[positions]], axis=1
            )
        for query in {int(positions[0]), int(positions[-1])}:
            reads = self._read(plan, slot, query)
        reads = self._read(plan, slot, int(positions[-1]))
        row.written += count
        if not sample:
            return -1, (0.0, 0)
        if row.request.id in self.poison:
            row.ended = FinishReason.ERROR
            return -2, (float("nan"), 0)
        sampling, produced = row.request.sampling, len(row.tokens) - row.prompt
        early = produced < sampling.min_tokens
        token = next_token(sampling.seed, len(row.tokens), reads, row.stop_ids if early else ())
        row.tokens.append(token)
        if token in row.stop_ids:
            row.ended = FinishReason.STOP
        elif len(row.tokens) >= row.max_len:
            row.ended = FinishReason.LENGTH
        return token, score(reads, token)

    def _places(self, plan: StepPlan, index: int, slot: int, positions: np.ndarray) -> np.ndarray:
        tables = plan.tables[index]
        columns = positions // self.page_size - tables.base[slot]
        assert (columns >= 0).all(), "a position is behind the table's base"
        assert (columns < tables.table.shape[1]).all(), "a position is past the table's width"
        pages = tables.table[slot, columns]
        assert (pages > 0).all(), "a live row touches page 0"
        return pages * self.page_size + positions % self.page_size

    def _read(self, plan: StepPlan, slot: int, query: int) -> list[np.ndarray]:
        """Tokens that the query at a position sees, per group, through the tables."""
        row, reads = self.rows[slot], []
        for index, group in enumerate(self.groups):
            positions = np.arange(visible_from(group, query), query + 1)
            held = self.pools[index][self._places(plan, index, slot, positions)]
            assert (held[:, 0] == row.uid).all(), "a place holds another sequence's token"
            assert np.array_equal(held[:, 1], positions), "a place holds another position"
            reads.append(held[:, 2].astype(np.int32))
        return reads


def _logprob_arrays(scores: np.ndarray) -> LogprobArrays:
    """``scores`` [..., 2]: value and rank. The alternatives are made up from the value."""
    value, rank = scores[..., 0].astype(np.float32), scores[..., 1].astype(np.int32)
    ids = np.broadcast_to(np.arange(MAX_LOGPROBS, dtype=np.int32), (*value.shape, MAX_LOGPROBS))
    return LogprobArrays(value, rank, ids, value[..., None] - np.arange(MAX_LOGPROBS, dtype=np.float32))


class Harness:
    """A scheduler and its device, with ``lag`` steps between making a plan and committing its output."""

    def __init__(self, *, groups: tuple[CacheGroup, ...], num_pages: tuple[int, ...], lag: int = 1, **kw: int) -> None:
        self.scheduler = Scheduler(groups=groups, num_pages=num_pages, eos_token_ids=EOS, vocab_size=VOCAB, **kw)
        self.device = FakeDevice(groups, num_pages, kw["page_size"])
        self.groups, self.lag = groups, lag
        self.events: dict[str, list[TokenEvent]] = {}
        self.plans: list[StepPlan] = []

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.events[request.id] = []

    def step(self) -> list[TokenEvent]:
        """One turn of the engine's loop: plan and dispatch, then commit what is old enough."""
        plan = self.scheduler.plan()
        self.scheduler.check_integrity()
        if plan is not None:
            self.plans.append(plan)
            self.device.submit(plan)
        events: list[TokenEvent] = []
        while self.device.plans and (len(self.device.plans) > self.lag or plan is None):
            events += self.scheduler.commit(*self.device.run_next())
            self.scheduler.check_integrity()
            if plan is None:
                break
        for event in events:
            self.events[event.request_id].append(event)
        assert plan is not None or events or self.device.plans or not self.scheduler.has_work(), "stalled"
        return events

    def drain(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def run_until(self, done: Callable[[], bool], max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if done():
                return
            self.step()
        raise AssertionError(f"not reached in {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [token for event in self.events[request_id] for token in event.token_ids]

    def finish(self, request_id: str) -> FinishReason | None:
        return self.events[request_id][-1].finish_reason if self.events[request_id] else None

    def check_idle(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert not any(stats.pages_used)
        assert not any(stats.live_tokens)
