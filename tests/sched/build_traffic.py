"""What a request's events must be, worked out from the request alone."""

from __future__ import annotations

import numpy as np

from jaxsqueeze.types import CacheGroup, FinishReason, Request
from tests.sched.build_device import EOS, Harness, prompt_scores, score, solo_run, visible_from

FULL = CacheGroup("full", (0,))


def window(size: int) -> CacheGroup:
    return CacheGroup(f"window{size}", (1,), size)


def check_result(harness: Harness, request: Request, max_len: int, *, aborted: bool = False) -> None:
    """The request's tokens, reasons, log-probabilities and their places are those of its solo run."""
    sampling, events = request.sampling, harness.events[request.id]
    tokens, reason = solo_run(request, harness.groups, max_len)
    got = harness.tokens(request.id)
    if aborted:
        assert got == tokens[: len(got)]
        assert all(event.finish_reason is None for event in events)
        return
    assert got == tokens
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [reason]
    assert all(event.num_cached_tokens == 0 and event.error is None for event in events)
    own_stop = reason is FinishReason.STOP and (sampling.ignore_eos or tokens[-1] not in EOS)
    assert events[-1].stop_reason == (tokens[-1] if own_stop else None)
    _check_prompt_logprobs(harness, request)
    _check_logprobs(harness, request, tokens)


def _check_prompt_logprobs(harness: Harness, request: Request) -> None:
    first, *rest = [event.prompt_logprobs for event in harness.events[request.id]]
    assert rest == [None] * len(rest)
    top = request.sampling.prompt_logprobs
    if top is None:
        assert first is None
        return
    assert [entry and (entry.logprob, entry.rank) for entry in first] == prompt_scores(request, harness.groups)
    assert [entry and entry.token_id for entry in first] == [None, *request.prompt_ids[1:]]
    assert all(len(entry.top) == top for entry in first[1:])


def _check_logprobs(harness: Harness, request: Request, tokens: list[int]) -> None:
    events, top = harness.events[request.id], request.sampling.logprobs
    if top is None:
        assert all(event.logprobs is None for event in events)
        return
    entries = [entry for event in events for entry in event.logprobs]
    assert [entry.token_id for entry in entries] == tokens
    known = list(request.prompt_ids)
    for entry in entries:
        query = len(known) - 1
        reads = [np.asarray(known[visible_from(group, query) :], np.int32) for group in harness.groups]
        assert (entry.logprob, entry.rank) == score(reads, entry.token_id)
        assert len(entry.top) == top
        known.append(entry.token_id)
