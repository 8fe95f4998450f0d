"""The text that models are compared on: windows of tokens, and how rare each token is."""

from __future__ import annotations

import dataclasses

import numpy as np

DECILES = tuple(f"decile {i}" for i in range(1, 11))  # 1: the most frequent words
ONCE = "unseen or once"
BUCKETS = (*DECILES, ONCE)
RARE = (DECILES[-1], ONCE)  # what the headline calls rare


@dataclasses.dataclass(frozen=True)
class Window:
    """A stretch of text that is scored by itself: token i + 1 is predicted from tokens 0 .. i."""

    tokens: np.ndarray  # i32[n]


def windows(ids: np.ndarray, length: int, most: int | None) -> list[Window]:
    """``ids`` cut into pieces of ``length`` tokens, at most ``most`` tokens in all. A piece of one token predicts
    nothing and is left out. Raises ValueError if nothing is left."""
    ids = ids[:most]
    found = [Window(ids[at : at + length]) for at in range(0, len(ids), length)]
    found = [window for window in found if len(window.tokens) > 1]
    if not found:
        raise ValueError("the text has fewer than two tokens; give a longer one")
    return found


def rarity(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """i32[V]: the index in ``BUCKETS`` of each word of the vocabulary, by its count in ``ids``.

    Words seen twice or more are ordered by count (ties by id). Their occurrences, laid end to end in that order, are
    cut into ten equal parts; a word belongs to the part that holds its middle.
    """
    count = np.bincount(ids, minlength=vocab_size)
    bucket = np.full(vocab_size, len(DECILES), np.int32)
    words = np.flatnonzero(count >= 2)
    words = words[np.argsort(-count[words], kind="stable")]
    end = np.cumsum(count[words])
    if len(words):
        bucket[words] = np.minimum((end - count[words] / 2) * 10 // end[-1], 9)
    return bucket
