"""Seq: one request inside the scheduler, from the door to its last token.

Three counters describe it, because plan N+1 is made before step N's tokens are known:

- ``num_computed``: tokens whose KV is in the pool once every plan made so far has run;
- ``output_ids``: sampled tokens the host has seen (committed);
- ``num_inflight``: sampled tokens of plans that are made but not committed.

It is in one of three places: queued (waits, holds nothing), in a slot (holds pages), or drained (all it will ever
compute is planned: slot and pages are free for others already, only its last tokens are still to come).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxsqueeze.types import NOT_FINITE, Admit, FinishReason, Logprob, Request


@dataclasses.dataclass(eq=False, slots=True)
class Seq:
    request: Request
    order: int  # place in the order of arrival at this scheduler
    max_len: int  # total length at which it ends; the prompt's length: score the prompt, sample nothing
    eos_ids: frozenset[int]  # empty if ignored
    prompt_ids: np.ndarray = dataclasses.field(init=False)  # i32[prompt]
    key: tuple[int, float, int] = dataclasses.field(init=False)  # who goes first: smaller
    stop_ids: frozenset[int] = dataclasses.field(init=False)  # all that end it: EOS and its own
    output_ids: list[int] = dataclasses.field(default_factory=list)
    num_prefill: int = 0  # length of prefill_ids
    num_computed: int = 0
    num_inflight: int = 0
    num_cached: int = 0  # prompt tokens found in a cache instead of computed
    slot: int | None = None
    queued: bool = False
    prefill_ids: np.ndarray = dataclasses.field(init=False)  # i32: prompt and output known at the last admission
    prompt_scores: list[Logprob | None] | None = None  # one per prompt token while they are being collected
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.prompt_ids = self.prefill_ids = np.asarray(self.request.prompt_ids, np.int32)
        self.num_prefill = len(self.prompt_ids)
        self.stop_ids = self.eos_ids.union(self.request.sampling.stop_token_ids)
        self.key = (self.request.priority, self.request.arrival, self.order)
        if self.request.sampling.prompt_logprobs is not None:
            self.prompt_scores = [None] * len(self.prompt_ids)

    @property
    def most_written(self) -> int:
        """Tokens in the pool at its end: the last sampled one is never written."""
        return max(len(self.prompt_ids), self.max_len - 1)

    @property
    def num_known(self) -> int:
        """Tokens the host has seen, all of which a (re-)admission has to prefill."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.num_prefill

    @property
    def to_prefill(self) -> int:
        return self.num_known if self.queued else self.num_prefill - self.num_computed

    @property
    def remaining(self) -> int:
        """Tokens that may still be planned for a decoding sequence: its newest token is at ``num_computed``."""
        return self.max_len - self.num_computed - 1

    @property
    def drained(self) -> bool:
        return not self.prefilling and self.remaining <= 0

    def admit(self, slot: int) -> Admit:
        """Takes a slot; all known tokens are to be prefilled."""
        assert self.num_inflight == 0, "tokens in flight: what to prefill is not known yet"
        output = np.asarray(self.output_ids, np.int32)
        self.slot, self.queued, self.num_computed = slot, False, 0
        self.prefill_ids = np.concatenate((self.prompt_ids, output))
        self.num_prefill = len(self.prefill_ids)
        return Admit(slot, self.request, self.prompt_ids, output, tuple(sorted(self.stop_ids)), self.max_len)

    def accept(self, tokens: list[int]) -> int:
        """Appends sampled tokens up to the one that ends the sequence; how many were appended."""
        min_tokens, longest = self.request.sampling.min_tokens, self.max_len - len(self.prompt_ids)
        for count, token in enumerate(tokens):
            if token < 0:
                self.finish_reason = FinishReason.ERROR
                if token == NOT_FINITE:
                    self.error = "the model's logits were not finite"
                else:
                    self.error = "internal error: the device ended a sequence that the host did not"
                return count
            self.output_ids.append(token)
            if token in self.stop_ids and len(self.output_ids) > min_tokens:
                self.finish_reason = FinishReason.STOP
                self.stop_reason = None if token in self.eos_ids else token
                return count + 1
            if len(self.output_ids) == longest:
                self.finish_reason = FinishReason.LENGTH
                return count + 1
        return len(tokens)
