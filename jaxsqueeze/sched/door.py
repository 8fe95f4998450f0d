"""What a request must satisfy before it is queued. A request that passes always finishes; one that never could is
refused here, with a message that tells the client what would fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxsqueeze.sched.pages import PageTable
from jaxsqueeze.types import MAX_STOP_IDS, Request, RequestRefused


def check_request(
    request: Request, *, tables: Sequence[PageTable], max_model_len: int, vocab_size: int, eos_ids: frozenset[int]
) -> int:
    """The total length at which the request ends. Raises RequestRefused; changes nothing."""
    sampling = request.sampling
    if sampling.n != 1:
        raise RequestRefused(f"n = {sampling.n}: a request here is one choice (see split_choices)")
    _check_ids("prompt", request.prompt_ids, vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("logit_bias", (token for token, _ in sampling.logit_bias), vocab_size)
    _check_ids("bad_words", (token for word in sampling.bad_words_ids for token in word), vocab_size)
    stops = len(eos_ids.union(sampling.stop_token_ids))
    if stops > MAX_STOP_IDS:
        raise RequestRefused(f"{stops} stop ids (the model's EOS ids included); at most {MAX_STOP_IDS} are possible")
    return _final_length(request, tables, max_model_len)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    ids = tuple(ids)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestRefused(f"{name}: token id {bad} is outside the vocabulary of {vocab_size}")


def _final_length(request: Request, tables: Sequence[PageTable], max_model_len: int) -> int:
    prompt = len(request.prompt_ids)
    if prompt == 0:
        raise RequestRefused("the prompt is empty")
    if prompt >= max_model_len:
        raise RequestRefused(
            f"the prompt has {prompt} tokens; at most {max_model_len - 1} fit in max_model_len {max_model_len} "
            "with one token of output"
        )
    limits = [limit for table in tables if (limit := table.longest()) is not None]
    pool = min(limits, default=max_model_len)  # tokens; the last sampled token is never written
    if prompt > pool:
        raise RequestRefused(f"the prompt has {prompt} tokens; the KV pool holds {pool} (see --kv-bytes)")
    wanted = request.sampling.max_tokens
    if wanted is None:
        return min(max_model_len, pool + 1)
    length = min(max_model_len, prompt + wanted)
    if length - 1 > pool:
        raise RequestRefused(
            f"prompt of {prompt} and max_tokens {wanted} need {length - 1} tokens of KV; the pool holds {pool}: "
            f"max_tokens {pool + 1 - prompt} would fit (or see --kv-bytes)"
        )
    return length
