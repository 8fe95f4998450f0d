"""Log-probabilities in the API's three shapes. Values are raw log-softmax; -inf, which JSON cannot say, is -9999."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxsqueeze.text.detokenize import Detokenizer
from jaxsqueeze.text.tokenizer import Tokenizer
from jaxsqueeze.types import Logprob

FLOOR = -9999.0


def finite(value: float) -> float:
    return max(value, FLOOR) if math.isfinite(value) else FLOOR


def chat_entries(tokenizer: Tokenizer, logprobs: Iterable[Logprob]) -> list[dict[str, Any]]:
    """``choices[].logprobs.content`` of chat completions."""

    def entry(token_id: int, value: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": tokenizer.token_text(token_id), "logprob": finite(value), "bytes": list(raw)}

    return [{**entry(p.token_id, p.logprob), "top_logprobs": [entry(i, v) for i, v in p.top]} for p in logprobs]


def completion_entries(
    tokenizer: Tokenizer, logprobs: Sequence[Logprob | None], token_ids: Sequence[int], offsets: Sequence[int]
) -> dict[str, list[Any]]:
    """``choices[].logprobs`` of completions; None stands for the first prompt token, which nothing precedes."""

    def top(p: Logprob) -> dict[str, float]:
        best = {tokenizer.token_text(i): finite(v) for i, v in p.top}
        return {**best, tokenizer.token_text(p.token_id): finite(p.logprob)}

    return {
        "tokens": [tokenizer.token_text(i) for i in token_ids],
        "token_logprobs": [None if p is None else finite(p.logprob) for p in logprobs],
        "top_logprobs": [None if p is None else top(p) for p in logprobs],
        "text_offset": list(offsets),
    }


def prompt_offsets(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """Characters of the prompt's text before each of its tokens."""
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens)
    offsets = []
    for token_id in ids:
        offsets.append(detokenizer.length)
        detokenizer.push(token_id)
    return offsets


def prompt_entries(tokenizer: Tokenizer, logprobs: Sequence[Logprob | None]) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: per position, token id to its value, rank and text."""

    def entry(token_id: int, value: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(value), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    def position(p: Logprob) -> dict[str, Any]:
        best = {str(i): entry(i, v, rank) for rank, (i, v) in enumerate(p.top, 1)}
        return {str(p.token_id): entry(p.token_id, p.logprob, p.rank), **best}

    return [None if p is None else position(p) for p in logprobs]
