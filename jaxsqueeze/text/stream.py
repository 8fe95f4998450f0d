"""One choice's token events in, text deltas out: detokenising, stop strings and where the answer ends.

Used by the server and by the offline ``LLM`` alike. An event may carry any number of tokens; they are taken one by one,
so an answer is the same however the engine groups them, and everything after the token that completes a stop string
(ids, logprobs, counts) is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxsqueeze.text.detokenize import Detokenizer
from jaxsqueeze.text.stop import StopFilter
from jaxsqueeze.text.tokenizer import Tokenizer
from jaxsqueeze.types import FinishReason, Logprob, SamplingParams, TokenEvent


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one event adds to an answer. ``text`` may lag behind ``token_ids``: characters not finished yet, or text
    that may still become a stop string."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] | None = None  # one per token, if asked for
    offsets: tuple[int, ...] = ()  # per token: characters of the answer before it, held ones counted
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or stop id that ended it; None for EOS


class ChoiceStream:
    """``prompt_ids``: tokens that the text continues (completions, an open assistant turn); empty for a text that
    starts anew (see ``Detokenizer``).

    When ``finished`` is set by a stop string, the engine does not know: the caller aborts the request there.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        self._sampling = sampling
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, sampling.skip_special_tokens)
        self._filter = StopFilter(sampling.stop, keep_stop=sampling.include_stop_str_in_output)
        self.num_tokens = 0
        self.finished: FinishReason | None = None

    def push(self, event: TokenEvent) -> Delta:
        """Takes the next event of the request. Events after the end add nothing."""
        if self.finished:
            return Delta("")
        text: list[str] = []
        offsets: list[int] = []
        count = len(event.token_ids)
        # An engine that stops at an id reports it as the last token; its text is not part of the answer.
        ends_at_id = event.finish_reason is FinishReason.STOP and not self._sampling.include_stop_str_in_output
        taken = count
        for index, token_id in enumerate(event.token_ids):
            offsets.append(self._detokenizer.length)
            self.num_tokens += 1
            if ends_at_id and index == count - 1:
                continue
            may_stop = self.num_tokens > self._sampling.min_tokens
            text.append(self._filter.push(self._detokenizer.push(token_id), may_stop))
            if self._filter.stopped:
                taken = index + 1
                break
        reason, stop_reason = event.finish_reason, event.stop_reason
        if reason and not self._filter.stopped:
            text.append(self._filter.push(self._detokenizer.finish(), self.num_tokens > self._sampling.min_tokens))
        if self._filter.stopped:
            reason, stop_reason = FinishReason.STOP, self._filter.stopped
        elif reason:
            text.append(self._filter.release())
        self.finished = reason
        logprobs = None if event.logprobs is None else event.logprobs[:taken]
        return Delta("".join(text), event.token_ids[:taken], logprobs, tuple(offsets), reason, stop_reason)
