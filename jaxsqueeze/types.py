"""Host data types that cross module borders: request, step plan, step output, token event.

One request travels ``Request -> Seq -> StepPlan -> StepOutput -> TokenEvent``. Everything here is plain Python and
numpy, so the scheduler can be tested without an accelerator runtime.

Units: positions and lengths are tokens; a position is absolute in its sequence (prompt first). ``S`` is
``EngineConfig.max_slots``; slot ``S`` is the trash slot that masked rows use.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

# Device-side row state is of static size; a request that needs more is refused at the door.
MAX_LOGPROBS = 20  # top alternatives returned per token
MAX_STOP_IDS = 32  # EOS ids and stop_token_ids together
MAX_LOGIT_BIAS = 512  # entries
MAX_BIAS = 1_000_000  # a bias larger than any logit, that no later arithmetic in float32 overflows
MAX_BAD_WORDS = 32  # token sequences, both spellings of a word counted
MAX_BAD_WORD_LEN = 8  # tokens in one of them
MAX_CHOICES = 128  # n

# In place of a sampled token.
NO_TOKEN = -1  # the row had ended, or was not asked for one
NOT_FINITE = -2  # the row's logits were not finite: its request ends with an error


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an EOS or stop id was sampled, or a stop string was found
    LENGTH = "length"  # max_tokens or max_model_len reached
    ABORT = "abort"  # the client went away
    ERROR = "error"  # this request failed; the others go on


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. Semantics follow the OpenAI and vLLM APIs; order of the filters follows transformers:
    logit_bias, bad words and min_tokens masks, penalties, temperature, top_k, top_p over what top_k left
    (renormalised), min_p.

    Raises ValueError with the offending value. ``top_k`` 0 and -1 both switch it off. Lists do for tuples, one string
    for ``stop``, and a dict for ``logit_bias``.
    """

    max_tokens: int | None = None  # None: up to max_model_len
    min_tokens: int = 0  # EOS and stop ids are masked, stop strings ignored, before this many tokens
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    frequency_penalty: float = 0.0  # over output
    presence_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added value)
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # sequences whose last token is blocked after the others
    seed: int | None = None  # None: the engine draws one
    n: int = 1
    logprobs: int | None = None  # top alternatives per sampled token; 0: only the sampled token's own
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        frozen = {
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids),
            "logit_bias": tuple(tuple(entry) for entry in bias),
            "bad_words_ids": tuple(tuple(word) for word in self.bad_words_ids),
        }
        for name, value in frozen.items():
            object.__setattr__(self, name, value)

        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")

        need(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", ">= 0")
        need(self.min_tokens >= 0, "min_tokens", ">= 0")
        need(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "<= max_tokens")
        need(math.isfinite(self.temperature) and 0 <= self.temperature <= 100, "temperature", "between 0 and 100")
        need(self.top_k >= -1, "top_k", "-1 or 0 (off) or positive")
        need(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        need(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        need(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "between 0.01 and 100")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]")
        need(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]")
        need(all(abs(b) <= MAX_BIAS for _, b in self.logit_bias), "logit_bias", f"between -{MAX_BIAS} and {MAX_BIAS}")
        need(len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
        need(len(self.bad_words_ids) <= MAX_BAD_WORDS, "bad_words_ids", f"at most {MAX_BAD_WORDS} sequences")
        need(
            all(1 <= len(w) <= MAX_BAD_WORD_LEN for w in self.bad_words_ids),
            "bad_words_ids",
            f"sequences of 1 to {MAX_BAD_WORD_LEN} tokens",
        )
        need(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        need(1 <= self.n <= MAX_CHOICES, "n", f"between 1 and {MAX_CHOICES}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            need(value is None or 0 <= value <= MAX_LOGPROBS, name, f"between 0 and {MAX_LOGPROBS}")
        need(all(self.stop), "stop", "non-empty strings")
        need(len(self.stop_token_ids) <= MAX_STOP_IDS, "stop_token_ids", f"at most {MAX_STOP_IDS} ids")


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user asked for, tokenised. One choice: a request with ``n`` > 1 is split by ``split_choices``."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0  # lower runs first, as in vLLM
    arrival: float = 0.0  # seconds, monotonic clock


def split_choices(request: Request) -> list[Request]:
    """One request per choice, ids ``<id>#<index>``; choice i of a seeded request always has the same own seed."""
    s = request.sampling
    if s.n == 1:
        return [request]

    def choice(i: int) -> Request:
        seed = None if s.seed is None else (s.seed + i * 0x9E3779B97F4A7C15) % 2**64
        return dataclasses.replace(request, id=f"{request.id}#{i}", sampling=dataclasses.replace(s, n=1, seed=seed))

    return [choice(i) for i in range(s.n)]


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers that share one page table. ``window`` is None for full attention, else tokens visible to a query
    (itself included)."""

    name: str
    layers: tuple[int, ...]
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class Admit:
    """A sequence takes a slot. The runner writes the slot's sampling state before the step runs.

    ``output_ids`` is not empty when the sequence was preempted: those tokens are prefilled again, and count as
    output for penalties and bad words.
    """

    slot: int
    request: Request
    prompt_ids: np.ndarray  # i32[prompt]
    output_ids: np.ndarray  # i32[output so far]
    stop_ids: tuple[int, ...]  # EOS (unless ignored) and stop_token_ids
    max_len: int  # total length at which generation ends


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A run of one sequence's tokens to prefill: positions ``start .. start + len(token_ids)``."""

    slot: int
    request_id: str
    start: int
    token_ids: np.ndarray  # i32[chunk]
    sample: bool  # the last chunk of its sequence: sample the next token from its last position
    prompt_logprobs: bool  # score the prompt tokens that follow each token of the chunk
    next_token: int = -1  # the prompt token after the chunk, for its score; -1: the chunk ends the prompt


@dataclasses.dataclass(frozen=True)
class GroupTables:
    """Page tables of one cache group at plan time, all slots. Position ``t`` of slot ``s`` lives in page
    ``table[s, t // page_size - base[s]]``; entries not in use are page 0, the trash page."""

    table: np.ndarray  # i32[S + 1, pages]
    base: np.ndarray  # i32[S + 1], first page kept (> 0 only behind a sliding window)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Everything a device step needs, decided on the host; every page it may write is reserved already.

    ``chunks`` empty: a ``decode_n`` step, each decode row runs up to ``num_steps`` tokens. Otherwise a ``mixed``
    step: the chunks and one token for each decode row.
    """

    step_id: int
    admits: tuple[Admit, ...]
    chunks: tuple[Chunk, ...]
    decode_slots: np.ndarray  # i32[b], rows in this order
    decode_request_ids: tuple[str, ...]  # same order
    decode_context: np.ndarray  # i32[b], tokens of the row that are in the pool before this step
    num_steps: int
    tables: tuple[GroupTables, ...]  # one per cache group, in the order of the groups

    @property
    def kind(self) -> Literal["mixed", "decode"]:
        return "mixed" if self.chunks else "decode"


@dataclasses.dataclass(frozen=True)
class LogprobArrays:
    """Raw log-softmax (before temperature, penalties and filters) of sampled tokens and the best alternatives."""

    token: np.ndarray  # f32[...]
    rank: np.ndarray  # i32[...], 1 is the most likely
    top_ids: np.ndarray  # i32[..., MAX_LOGPROBS]
    top: np.ndarray  # f32[..., MAX_LOGPROBS]


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What a step produced; tokens may be ``NO_TOKEN`` or ``NOT_FINITE``."""

    step_id: int
    decode_tokens: np.ndarray  # i32[num_steps, b]
    chunk_tokens: np.ndarray  # i32[len(chunks)]
    decode_logprobs: LogprobArrays | None  # leading shape [num_steps, b]
    chunk_logprobs: LogprobArrays | None  # leading shape [len(chunks)]
    # Per chunk with prompt_logprobs, leading shape [chunk]: entry j scores position start + j + 1 given what
    # precedes it; the last one is for Chunk.next_token (meaningless where that is -1).
    prompt_logprobs: tuple[LogprobArrays | None, ...]


@dataclasses.dataclass(frozen=True)
class Logprob:
    """One position: the token's own log-probability and rank, and the best ``k`` alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """New tokens of one request after a step; the last event of a request carries ``finish_reason``."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None = None  # one per token, if asked for
    prompt_logprobs: tuple[Logprob | None, ...] | None = None  # once, with the first token; [0] is None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop id that ended it, if it was not an EOS id
    num_cached_tokens: int = 0  # prompt tokens that were not computed
    error: str | None = None


class RequestRefused(ValueError):
    """The request can never run here; the message tells the client why and what would fit."""
