"""From a request's fields to ``SamplingParams``. What a request leaves out takes OpenAI's default (temperature 1,
top_p 1); the model's generation_config gives EOS ids only: answers do not depend on a file that clients cannot see."""

from __future__ import annotations

from jaxsqueeze.server.config import MAX_BAD_WORD_CHARS, MAX_STOP_CHARS
from jaxsqueeze.server.schema import ChatRequest, CompletionRequest, Generate
from jaxsqueeze.text.bad_words import bad_words_ids
from jaxsqueeze.text.tokenizer import Tokenizer
from jaxsqueeze.types import SamplingParams


def completion_sampling(fields: CompletionRequest, tokenizer: Tokenizer, vocab_size: int) -> SamplingParams:
    """Raises ValueError."""
    prompt_logprobs = fields.prompt_logprobs
    if fields.echo and fields.logprobs is not None and prompt_logprobs is None:
        prompt_logprobs = fields.logprobs
    return _sampling(fields, tokenizer, vocab_size, fields.max_tokens, fields.logprobs, prompt_logprobs)


def chat_sampling(fields: ChatRequest, tokenizer: Tokenizer, vocab_size: int) -> SamplingParams:
    """Raises ValueError."""
    max_tokens = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    return _sampling(fields, tokenizer, vocab_size, max_tokens, logprobs, fields.prompt_logprobs)


def _sampling(
    fields: Generate,
    tokenizer: Tokenizer,
    vocab_size: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    _limit("stop", fields.stop, MAX_STOP_CHARS)
    _limit("bad_words", fields.bad_words, MAX_BAD_WORD_CHARS)
    for token in fields.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"stop_token_ids: {token} is outside the vocabulary of {vocab_size}")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens,
        temperature=fields.temperature,
        top_k=fields.top_k,
        top_p=fields.top_p,
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        frequency_penalty=fields.frequency_penalty,
        presence_penalty=fields.presence_penalty,
        logit_bias=_logit_bias(fields.logit_bias, vocab_size),
        bad_words_ids=bad_words_ids(tokenizer, fields.bad_words),
        seed=fields.seed,
        n=fields.n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=tuple(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos,
        include_stop_str_in_output=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
    )


def _limit(name: str, texts: list[str], chars: int) -> None:
    for text in texts:
        if len(text) > chars:
            raise ValueError(f"{name}: a text of {len(text)} characters; at most {chars} are allowed")


def _logit_bias(given: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for key, bias in given.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) <= 10 else -1
        if not 0 <= token < vocab_size:
            raise ValueError(f"logit_bias: {key[:40]!r} is not a token id below {vocab_size}")
        if not -100 <= bias <= 100:
            raise ValueError(f"logit_bias must be between -100 and 100, got {bias}")
        biases[token] = bias
    return tuple(biases.items())
