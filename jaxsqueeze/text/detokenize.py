"""Incremental detokeniser: ids in, text out as soon as it is certain.

Each id adds fixed bytes (``Tokenizer.token_bytes``); an incremental UTF-8 decoder turns them into text and keeps the
bytes of an unfinished character back. The deltas do not depend on how ids are grouped, and add up to
``Tokenizer.decode`` of all of them.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxsqueeze.text.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """``prompt_ids``: tokens that the text continues. Its first token then keeps a leading space, and completes a
    character that the prompt left unfinished; empty for a text that starts anew (an assistant's turn)."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._utf8 = _Utf8(errors="replace")
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._at_start = tokenizer.rule.strips_space and not any(self._visible(i) for i in prompt_ids)
        # Only an unfinished character of the prompt matters, at most three bytes from its end.
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) > 3:
                break
            tail = self._visible(token_id) + tail
        self._utf8.decode(tail[-4:])
        self._began = False  # some byte of this text was pushed
        self.length = 0  # characters given out

    def push(self, token_id: int) -> str:
        """Text that became certain with this id; may be empty."""
        raw = self._visible(token_id)
        self._began |= bool(raw)
        if self._at_start and raw:
            self._at_start = False
            raw = raw.removeprefix(b" ")
        return self._out(self._utf8.decode(raw))

    def finish(self) -> str:
        """What an unfinished character reads as at the end of a text (U+FFFD); empty if there is none, or if it is the
        prompt's alone."""
        if not self._began:
            return ""
        return self._out(self._utf8.decode(b"", final=True))

    def _visible(self, token_id: int) -> bytes:
        return b"" if token_id in self._skip else self._tokenizer.token_bytes(token_id)

    def _out(self, text: str) -> str:
        self.length += len(text)
        return text
