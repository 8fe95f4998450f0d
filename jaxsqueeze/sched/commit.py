"""From a step's arrays to events: which sequence each row was, what its tokens mean, and its log-probabilities."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxsqueeze.sched.seq import Seq
from jaxsqueeze.types import Chunk, FinishReason, Logprob, LogprobArrays, StepOutput, StepPlan, TokenEvent


@dataclasses.dataclass(frozen=True)
class Flight:
    """A plan whose output is not committed yet, and the sequences behind its rows.

    It holds the sequences themselves: a client may abort a request and send a new one under the same id meanwhile.
    """

    plan: StepPlan
    rows: tuple[tuple[Seq, int], ...]  # as plan.decode_slots, with the tokens each row was planned to produce
    chunks: tuple[Seq, ...]  # as plan.chunks

    def planned(self) -> list[tuple[Seq, int]]:
        """Each sequence of the plan and the tokens it was planned to produce."""
        return [
            *((seq, int(chunk.sample)) for seq, chunk in zip(self.chunks, self.plan.chunks, strict=True)),
            *self.rows,
        ]

    def commit(self, out: StepOutput) -> list[tuple[Seq, TokenEvent]]:
        """Appends the step's tokens to their sequences; one event for each that got any, or ended.

        Rows of sequences that ended meanwhile are ignored.
        """
        done: list[tuple[Seq, TokenEvent]] = []
        for index, (seq, chunk) in enumerate(zip(self.chunks, self.plan.chunks, strict=True)):
            if seq.finish_reason is not None:
                continue
            if chunk.prompt_logprobs:
                arrays = out.prompt_logprobs[index]
                assert arrays is not None, f"chunk {index} of step {out.step_id} came without prompt log-probabilities"
                _collect_scores(seq, chunk, arrays)
            if chunk.sample:
                seq.num_inflight -= 1
                arrays = _rows(out.chunk_logprobs, np.s_[index : index + 1])
                done.append((seq, _accept(seq, [int(out.chunk_tokens[index])], arrays)))
            elif chunk.start + len(chunk.token_ids) == seq.max_len:  # max_tokens 0: the prompt is scored
                seq.finish_reason = FinishReason.LENGTH
                done.append((seq, event_of(seq)))
        columns = out.decode_tokens.T.tolist()
        for index, (seq, planned) in enumerate(self.rows):
            if seq.finish_reason is not None:
                continue
            seq.num_inflight -= planned
            arrays = _rows(out.decode_logprobs, np.s_[:, index])
            done.append((seq, _accept(seq, columns[index], arrays)))
        return done


def event_of(seq: Seq, token_ids: tuple[int, ...] = (), logprobs: tuple[Logprob, ...] | None = None) -> TokenEvent:
    """The sequence's next event: new tokens, the prompt's scores if they were not delivered yet, how it ended."""
    prompt_logprobs = None
    if seq.prompt_scores is not None and seq.error is None:
        prompt_logprobs, seq.prompt_scores = tuple(seq.prompt_scores), None
    if logprobs is None and seq.request.sampling.logprobs is not None:
        logprobs = ()
    return TokenEvent(
        seq.request.id,
        token_ids,
        logprobs,
        prompt_logprobs,
        seq.finish_reason,
        seq.stop_reason,
        seq.num_cached,
        seq.error,
    )


def _accept(seq: Seq, tokens: list[int], arrays: LogprobArrays | None) -> TokenEvent:
    kept = tuple(tokens[: seq.accept(tokens)])
    top = seq.request.sampling.logprobs
    if top is None:
        return event_of(seq, kept)
    assert arrays is not None, "a step came without the log-probabilities that a row asked for"
    return event_of(seq, kept, tuple(_logprobs(arrays, kept, top)))


def _collect_scores(seq: Seq, chunk: Chunk, arrays: LogprobArrays) -> None:
    # A chunk may be run again after a preemption: it then writes the same places again.
    if seq.prompt_scores is not None:
        first = chunk.start + 1
        scored = seq.prompt_ids[first : first + len(chunk.token_ids)].tolist()
        top = seq.request.sampling.prompt_logprobs or 0
        seq.prompt_scores[first : first + len(scored)] = _logprobs(arrays, scored, top)


def _rows(arrays: LogprobArrays | None, index: object) -> LogprobArrays | None:
    if arrays is None:
        return None
    return LogprobArrays(arrays.token[index], arrays.rank[index], arrays.top_ids[index], arrays.top[index])


def _logprobs(arrays: LogprobArrays, token_ids: tuple[int, ...] | list[int], top: int) -> list[Logprob]:
    """Entry i of the arrays scores ``token_ids[i]``; ``top`` alternatives of each are kept."""
    count = len(token_ids)
    columns = (arrays.token[:count], arrays.rank[:count], arrays.top_ids[:count, :top], arrays.top[:count, :top])
    lists = zip(token_ids, *(column.tolist() for column in columns), strict=True)
    return [Logprob(token, own, rank, tuple(zip(ids, values, strict=True))) for token, own, rank, ids, values in lists]
