"""Bad words as token sequences: a word is blocked both with and without a space before it.

A tokenizer may spell the two with different numbers of tokens, and its spelling at the start of a text may differ from
that inside one, so the word is encoded in several surroundings and every spelling that stands for exactly the word's
bytes (or a space and the word's bytes) is kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxsqueeze.text.tokenizer import Tokenizer

_SURROUNDINGS = ("", "\n", ".")  # characters that tokenizers do not merge with letters


def bad_words_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences for ``SamplingParams.bad_words_ids``. Raises ValueError for an empty word."""
    found: dict[tuple[int, ...], None] = {}
    for given in words:
        word = given.strip(" ")
        if not word:
            raise ValueError(f"bad_words must be non-empty strings, got {given!r}")
        wanted = (word.encode("utf-8", "replace"), b" " + word.encode("utf-8", "replace"))
        for before in _SURROUNDINGS:
            context = tokenizer.encode(before, add_special_tokens=False) if before else []
            for text in (word, " " + word):
                ids = tokenizer.encode(before + text, add_special_tokens=False)
                spelling = tuple(ids[len(context) :])
                exact = b"".join(tokenizer.token_bytes(i) for i in spelling) in wanted
                if ids[: len(context)] == context and exact:
                    found[spelling] = None
    return tuple(found)
