"""What a call asks to be continued: the prompts of a completion, or a conversation, as token ids."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from jaxsqueeze.server.config import MAX_CHOICES_PER_CALL
from jaxsqueeze.server.service import Service
from jaxsqueeze.text.tokenizer import Tokenizer

T = TypeVar("T")
_INLINE_CHARS = 4000  # texts up to this long are tokenised on the event loop (well under a millisecond)


@dataclasses.dataclass(frozen=True)
class Prompt:
    ids: tuple[int, ...]
    text: str | None = None  # as the client sent it; None: ids, or a conversation
    continued: bool = True  # the answer continues the prompt's text; False: a turn of its own


async def off_loop(size: int, function: Callable[[], T]) -> T:
    """Runs short work at once, and work on a text of more than a few thousand characters on another thread."""
    return function() if size <= _INLINE_CHARS else await asyncio.to_thread(function)


async def completion_prompts(service: Service, prompt: Any, add_special_tokens: bool, n: int) -> list[Prompt]:
    """``prompt``: a text, ids, or a list of either. Raises ValueError."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_id(prompt[0])):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError("prompt must be a text, token ids, or a non-empty list of either")
    check_choices(len(prompt), n)
    tokenizer, vocab_size = service.tokenizer, service.engine.model_config.vocab_size

    def all_ids() -> list[Prompt]:
        return [_completion_prompt(p, tokenizer, add_special_tokens, vocab_size) for p in prompt]

    prompts = await off_loop(sum(len(p) for p in prompt if isinstance(p, str | list)), all_ids)
    for p in prompts:
        check_length(service, p.ids)
    return prompts


def _completion_prompt(given: Any, tokenizer: Tokenizer, add_special_tokens: bool, vocab_size: int) -> Prompt:
    if isinstance(given, str):
        return Prompt(tuple(tokenizer.encode(given, add_special_tokens)), given)
    if not isinstance(given, list) or not all(_is_id(i) for i in given):
        raise ValueError("prompt must be a text, token ids, or a non-empty list of either")
    for token in given:
        if not 0 <= token < vocab_size:
            raise ValueError(f"prompt: token id {token} is outside the vocabulary of {vocab_size}")
    return Prompt(tuple(given))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


async def chat_prompt(
    service: Service,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    add_special_tokens: bool,
    kwargs: dict[str, Any],
) -> Prompt:
    """Raises ValueError. ``add_generation_prompt`` None: unless the final message is continued."""
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise ValueError("every message needs a role")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message

    def render() -> Prompt:
        text = service.chat_template.render(messages, add_generation_prompt, continue_final_message, kwargs)
        return Prompt(tuple(service.tokenizer.encode(text, add_special_tokens)), continued=continue_final_message)

    return await off_loop(sum(len(str(m.get("content"))) for m in messages), render)


def check_choices(prompts: int, n: int) -> None:
    if prompts * n > MAX_CHOICES_PER_CALL:
        raise ValueError(f"{prompts} prompts x n {n} are too many choices for one call; at most {MAX_CHOICES_PER_CALL}")


def check_length(service: Service, ids: tuple[int, ...]) -> None:
    """What the engine would refuse too, said before anything is queued. Raises ValueError."""
    if not ids:
        raise ValueError("the prompt is empty")
    if len(ids) >= service.engine.max_model_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens; this server's maximum context length is "
            f"{service.engine.max_model_len} tokens, one of them for the answer"
        )
