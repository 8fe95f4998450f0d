"""Continuous batching: which tokens of which sequences the next device step computes, and where their KV goes.

``plan`` is called for step N+1 while step N runs on the device, so it never looks at tokens: it works on counters
(see ``seq``). Each call

1. goes over the sequences in slots, best first (priority, then arrival). A decoding one gets its next token, or a few
   when nobody waits; one that is still prefilling gets a chunk out of the step's token budget. Pages are reserved
   here, for all cache groups or none. When they run out the worst sequence is preempted: it gives back everything and
   waits in its old place of the queue, to prefill prompt and output again. The worst one itself sits the step out.
2. admits waiting sequences, best first, while slots, budget and pages last. (One preempted in this call does
   not come straight back: in the group that was short, less is free now than it gave back.)

Why every accepted request ends: the best sequence in a slot can take the pages of all others, and the door
(``door.check_request``) lets in only what fits the empty pool; so it always advances. Without one in a slot all pages
are free, and the best waiting one is admitted.

A sequence gives back slot and pages when its last step is *planned*, or when it is aborted: device steps run in the
order of their plans, so whoever gets them next writes after the last reader has read.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from jaxsqueeze.sched.commit import Flight, event_of
from jaxsqueeze.sched.door import check_request
from jaxsqueeze.sched.pages import PageTable, pages_fit, table_width
from jaxsqueeze.sched.seq import Seq
from jaxsqueeze.sched.stats import SchedulerStats
from jaxsqueeze.types import (
    Admit,
    CacheGroup,
    Chunk,
    FinishReason,
    Request,
    RequestRefused,
    StepOutput,
    StepPlan,
    TokenEvent,
)


class Scheduler:
    """``add``, then ``plan`` / ``commit`` in turns; several plans may be made before the first is committed.

    ``num_pages``: pages of each group's pool, the reserved page 0 included. ``max_step_tokens``: prefill tokens of a
    step (decode rows come on top); a chunk is charged in whole rows of ``row_tokens``, as the device computes it.
    ``deterministic``: a sequence's chunks start at multiples of one fixed size, so they do not depend on its
    neighbours, and its pages are promised to its last token, so it is never preempted.
    """

    def __init__(
        self,
        *,
        groups: tuple[CacheGroup, ...],
        num_pages: tuple[int, ...],
        max_slots: int,
        page_size: int,
        max_model_len: int,
        max_step_tokens: int,
        decode_steps: int,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        row_tokens: int = 1,
        seed: int = 0,
        deterministic: bool = False,
    ) -> None:
        self._tables = tuple(
            PageTable(
                group,
                num_pages=pages,
                max_slots=max_slots,
                page_size=page_size,
                width=table_width(
                    group,
                    page_size=page_size,
                    max_model_len=max_model_len,
                    max_step_tokens=max_step_tokens,
                    decode_steps=decode_steps,
                ),
            )
            for group, pages in zip(groups, num_pages, strict=True)
        )
        self._max_slots = max_slots
        self._max_model_len = max_model_len
        self._max_step_tokens = max_step_tokens
        self._row_tokens = row_tokens
        self._decode_steps = decode_steps
        self._deterministic = deterministic
        self._eos_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        # Chunks end on page borders, unless a step's budget is smaller than a page.
        self._chunk_unit = min(page_size, max_step_tokens)
        self._rng = np.random.default_rng(seed)
        self._order = itertools.count()
        self._step_ids = itertools.count()
        self._seqs: dict[str, Seq] = {}  # every unfinished one
        self._waiting: list[Seq] = []  # best first
        self._running: list[Seq] = []  # those in slots, best first
        self._free_slots = list(range(max_slots))  # a heap: low slots first
        self._flights: dict[int, Flight] = {}  # by step id, oldest first
        self._preemptions = 0

    def table_widths(self) -> tuple[int, ...]:
        """Columns of each group's page table."""
        return tuple(table.width for table in self._tables)

    # Requests in and out

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestRefused, with nothing changed, if it can never run here."""
        if request.id in self._seqs:
            raise RequestRefused(f"request id {request.id!r} is in use")
        sampling = request.sampling
        eos_ids = frozenset() if sampling.ignore_eos else self._eos_ids
        max_len = check_request(
            request,
            tables=self._tables,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            eos_ids=eos_ids,
        )
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=int(self._rng.integers(2**63)))
            request = dataclasses.replace(request, sampling=sampling)
        seq = Seq(request, next(self._order), max_len, eos_ids)
        self._seqs[request.id] = seq
        self._queue(seq)

    def abort(self, request_id: str) -> bool:
        """Forgets a request and frees its slot and pages; False if there is none of this id. Makes no event."""
        seq = self._seqs.get(request_id)
        if seq is None:
            return False
        seq.finish_reason = FinishReason.ABORT
        self._forget(seq)
        return True

    def fail(self, request_ids: Iterable[str], message: str) -> list[TokenEvent]:
        """Ends those of the requests that are unfinished with an error, and frees everything they hold."""
        seqs = [seq for request_id in dict.fromkeys(request_ids) if (seq := self._seqs.get(request_id)) is not None]
        return [self._fail(seq, message) for seq in seqs]

    def discard(self, plan: StepPlan, message: str) -> list[TokenEvent]:
        """Instead of ``commit`` when the step could not run: ends the requests of the plan with an error."""
        flight = self._flights.pop(plan.step_id)
        return [self._fail(seq, message) for seq, _ in flight.planned() if seq.finish_reason is None]

    def fail_running(self, message: str) -> list[TokenEvent]:
        """Ends every request that has a slot with an error; those who wait are untouched."""
        return [self._fail(seq, message) for seq in list(self._running)]

    def has_work(self) -> bool:
        """Whether a request is unfinished or a plan is not committed."""
        return bool(self._seqs or self._flights)

    # Steps

    def plan(self) -> StepPlan | None:
        """The next step, its pages reserved. None: nothing to do before the next ``commit`` or ``add``."""
        num_steps = self._choose_steps()
        budget = self._max_step_tokens
        rows: list[tuple[Seq, int]] = []
        chunks: list[tuple[Seq, int]] = []
        for seq in self._best_first():
            size = self._chunk_size(seq, budget) if seq.prefilling else min(num_steps, seq.remaining)
            if size == 0 or not self._reserve(seq, size):
                continue
            if seq.prefilling:
                chunks.append((seq, size))
                budget -= self._charge(size)
            else:
                rows.append((seq, size))
        admits = self._admit(budget, chunks)
        if not rows and not chunks:
            return None
        rows.sort(key=lambda row: row[0].slot)
        return self._take_off(rows, chunks, admits, num_steps)

    def commit(self, plan: StepPlan, out: StepOutput) -> list[TokenEvent]:
        """Takes a step's tokens in; plans are committed in the order they were made."""
        assert out.step_id == plan.step_id == next(iter(self._flights)), "plans are committed in order"
        events = []
        for seq, event in self._flights.pop(plan.step_id).commit(out):
            events.append(event)
            if seq.finish_reason is not None:
                self._forget(seq)
        return events

    # Planning

    def _choose_steps(self) -> int:
        """Tokens per row: one while others wait for the device or pages are scarce, else up to ``decode_steps``."""
        if self._waiting or not self._running or any(seq.prefilling for seq in self._running):
            return 1
        num_steps = min(self._decode_steps, max(seq.remaining for seq in self._running))
        for table in self._tables:
            if num_steps > 1 and table.pool.free < len(self._running) * table.peak(num_steps):
                ends = [(seq.slot, seq.num_computed + min(num_steps, seq.remaining)) for seq in self._running]
                if sum(table.missing(slot, end) for slot, end in ends) > table.pool.free:
                    return 1
        return num_steps

    def _best_first(self) -> Iterator[Seq]:
        """The sequences in slots; preemptions on the way take place behind the one at hand."""
        index = 0
        while index < len(self._running):
            yield self._running[index]
            index += 1

    def _chunk_size(self, seq: Seq, budget: int) -> int:
        """Tokens of the sequence's next chunk; 0 if the budget does not allow one."""
        left = seq.to_prefill
        if self._deterministic:
            size = min(left, self._max_step_tokens // self._chunk_unit * self._chunk_unit)
            return size if self._charge(size) <= budget else 0
        return left if self._charge(left) <= budget else min(left, budget // self._chunk_unit * self._chunk_unit)

    def _charge(self, size: int) -> int:
        return -(-size // self._row_tokens) * self._row_tokens

    def _reserve(self, seq: Seq, tokens: int) -> bool:
        """Pages for the sequence's next tokens in all groups, preempting worse ones; False if it is the worst."""
        end = seq.num_computed + tokens
        for table in self._tables:
            table.free_behind(seq.slot, seq.num_computed)
        needs = [table.missing(seq.slot, end) for table in self._tables]
        if not any(needs):
            return True
        while not pages_fit(self._tables, needs):
            if self._running[-1] is seq:
                return False
            self._preempt(self._running[-1])
        for table, pages in zip(self._tables, needs, strict=True):
            table.extend(seq.slot, pages)
        return True

    def _preempt(self, seq: Seq) -> None:
        self._vacate(seq)
        self._queue(seq)
        self._preemptions += 1

    def _queue(self, seq: Seq) -> None:
        seq.queued = True
        bisect.insort(self._waiting, seq, key=_key)

    def _vacate(self, seq: Seq) -> None:
        """Frees the sequence's slot and pages for the plans after those already made."""
        _remove(self._running, seq)
        for table in self._tables:
            table.release(seq.slot)
        heapq.heappush(self._free_slots, seq.slot)
        seq.slot = None

    def _forget(self, seq: Seq) -> None:
        """Drops a finished sequence, wherever it is."""
        del self._seqs[seq.request.id]
        if seq.queued:
            _remove(self._waiting, seq)
        elif seq.slot is not None:
            self._vacate(seq)

    def _fail(self, seq: Seq, message: str) -> TokenEvent:
        seq.finish_reason, seq.error = FinishReason.ERROR, message
        self._forget(seq)
        return event_of(seq)

    def _admit(self, budget: int, chunks: list[tuple[Seq, int]]) -> list[Admit]:
        """Gives slots and first chunks to waiting sequences; nobody overtakes the first of the queue."""
        admits = []
        while self._waiting and self._free_slots:
            seq = self._waiting[0]
            size = self._chunk_size(seq, budget)
            # A preempted one waits for its last tokens: they belong to what it has to prefill.
            if size == 0 or seq.num_inflight or not self._has_room(seq):
                break
            del self._waiting[0]
            admits.append(seq.admit(heapq.heappop(self._free_slots)))
            bisect.insort(self._running, seq, key=_key)
            reserved = self._reserve(seq, size)
            assert reserved, "an admitted sequence found no pages"
            chunks.append((seq, size))
            budget -= self._charge(size)
        return admits

    def _has_room(self, seq: Seq) -> bool:
        """Pages for all its known tokens, with those the others still need for theirs, and one to grow for each."""
        if self._deterministic:
            others, growth, last = self._running, 0, seq.most_written
        else:
            others, growth, last = [r for r in self._running if r.prefilling], len(self._running), seq.num_known
        ends = [(r, r.most_written if self._deterministic else r.num_prefill) for r in others]
        needs = []
        for table in self._tables:
            promised = sum(max(0, table.peak(end) - table.held(other.slot)) for other, end in ends)
            needs.append(table.peak(last) + promised + growth)
        return pages_fit(self._tables, needs)

    def _take_off(
        self, rows: list[tuple[Seq, int]], chunks: list[tuple[Seq, int]], admits: list[Admit], num_steps: int
    ) -> StepPlan:
        """Freezes the plan, then moves the counters past it."""
        plan = StepPlan(
            step_id=next(self._step_ids),
            admits=tuple(admits),
            chunks=tuple(_chunk(seq, size) for seq, size in chunks),
            decode_slots=np.asarray([seq.slot for seq, _ in rows], np.int32),
            decode_request_ids=tuple(seq.request.id for seq, _ in rows),
            decode_context=np.asarray([seq.num_computed for seq, _ in rows], np.int32),
            num_steps=num_steps,
            tables=tuple(table.snapshot() for table in self._tables),
        )
        self._flights[plan.step_id] = Flight(plan, tuple(rows), tuple(seq for seq, _ in chunks))
        for (seq, size), chunk in zip(chunks, plan.chunks, strict=True):
            seq.num_computed += size
            seq.num_inflight += chunk.sample
        for seq, size in rows:
            seq.num_computed += size
            seq.num_inflight += size
        for seq, _ in (*chunks, *rows):
            if seq.drained:
                self._vacate(seq)
        return plan

    # What it holds

    def stats(self) -> SchedulerStats:
        live, tail = [], []
        for table in self._tables:
            tails = [table.tail_tokens(seq.slot, seq.num_computed) for seq in self._running]
            live.append(table.pool.used * table.page_size - sum(tails))
            tail.append(sum(tails))
        return SchedulerStats(
            running=len(self._seqs) - len(self._waiting),
            waiting=len(self._waiting),
            preemptions=self._preemptions,
            pages_total=tuple(table.pool.total for table in self._tables),
            pages_used=tuple(table.pool.used for table in self._tables),
            live_tokens=tuple(live),
            tail_tokens=tuple(tail),
        )

    def check_integrity(self) -> None:
        """Asserts what must hold between calls: no page lost or held twice, every sequence in one place only."""
        slots = [seq.slot for seq in self._running]
        assert sorted(slots + self._free_slots) == list(range(self._max_slots)), "a slot is lost or used twice"
        for table in self._tables:
            table.check_integrity({seq.slot: seq.num_computed for seq in self._running})
        for queue in (self._waiting, self._running):
            assert queue == sorted(queue, key=_key), "a queue is out of order"
        assert all(seq.queued and seq.slot is None for seq in self._waiting)
        assert not any(seq.queued or seq.drained for seq in self._running)
        inflight = dict.fromkeys(self._seqs, 0)
        for flight in self._flights.values():
            for seq, count in flight.planned():
                if self._seqs.get(seq.request.id) is seq:
                    inflight[seq.request.id] += count
        for request_id, seq in self._seqs.items():
            assert seq.request.id == request_id
            assert seq.finish_reason is None, f"{request_id!r} has ended"
            assert seq.num_inflight == inflight[request_id], f"{request_id!r}: tokens in flight miscounted"
            assert seq.num_known + seq.num_inflight <= seq.max_len, f"{request_id!r} runs past its length"
            placed = (seq in self._waiting) + (seq in self._running)
            assert placed == (not (seq.drained and not seq.queued)), f"{request_id!r} is in {placed} queues"
            if seq in self._running and not seq.prefilling:
                assert seq.num_computed == seq.num_known + seq.num_inflight - 1, f"{request_id!r}: KV miscounted"


def _key(seq: Seq) -> tuple[int, float, int]:
    return seq.key


def _remove(queue: list[Seq], seq: Seq) -> None:
    index = bisect.bisect_left(queue, seq.key, key=_key)
    assert queue[index] is seq
    del queue[index]


def _chunk(seq: Seq, size: int) -> Chunk:
    start, end = seq.num_computed, seq.num_computed + size
    # Entry j of a chunk's scores belongs to position start + j + 1: past the prompt there is nothing to score.
    scored = seq.prompt_scores is not None and start + 1 < len(seq.prompt_ids)
    sample = end == seq.num_prefill < seq.max_len
    next_token = int(seq.prompt_ids[end]) if end < len(seq.prompt_ids) else -1
    return Chunk(seq.slot, seq.request.id, start, seq.prefill_ids[start:end], sample, scored, next_token)
