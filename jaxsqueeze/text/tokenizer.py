"""Tokenizer of a converted folder: text to ids, ids to bytes.

Built on the ``tokenizers`` library alone, from ``tokenizer.json`` and ``tokenizer_config.json``. Decoding here is exact
on bytes: every id stands for a fixed byte string, and a text is the UTF-8 reading of their concatenation (invalid runs
read as U+FFFD), less the one space that SentencePiece-style tokenizers put before a text. That makes decoding
incremental by construction and independent of how ids are grouped; for valid UTF-8 it is what ``tokenizers`` decodes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MULTIPLE_TEMPLATES_DEFAULT = "default"


def _byte_of_glyph() -> dict[str, int]:
    """Byte-level BPE (Radford et al. 2019) spells each byte as a printable character: those that print in Latin-1 as
    themselves, the others as 256, 257, ... in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_GLYPHS = _byte_of_glyph()


@dataclasses.dataclass(frozen=True)
class ByteRule:
    """How a vocabulary entry is spelled, read from the ``decoder`` of ``tokenizer.json``."""

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()  # (from, to), SentencePiece: ("▁", " ")
    byte_fallback: bool = False  # "<0x41>" stands for one byte
    strips_space: bool = False  # one space before the text is the tokenizer's own, not the text's

    @classmethod
    def from_json(cls, decoder: dict[str, Any] | None) -> ByteRule:
        """Raises ValueError for a decoder whose tokens do not stand for fixed byte strings."""
        if decoder is None:
            raise ValueError("tokenizer.json has no decoder: token bytes are unknown")
        parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        rule = cls()
        for part in parts:
            match part["type"]:
                case "ByteLevel":
                    rule = dataclasses.replace(rule, byte_level=True)
                case "ByteFallback":
                    rule = dataclasses.replace(rule, byte_fallback=True)
                case "Fuse":
                    pass
                case "Replace" if "String" in part["pattern"]:
                    pair = (part["pattern"]["String"], part["content"])
                    rule = dataclasses.replace(rule, replacements=(*rule.replacements, pair))
                case "Strip" if part["content"] == " " and part["start"] <= 1 and part["stop"] == 0:
                    rule = dataclasses.replace(rule, strips_space=part["start"] == 1)
                case "Metaspace":
                    prepends = part.get("prepend_scheme", "always") != "never" and part.get("add_prefix_space", True)
                    pair = (part["replacement"], " ")
                    rule = dataclasses.replace(
                        rule, replacements=(*rule.replacements, pair), strips_space=bool(prepends)
                    )
                case other:
                    raise ValueError(f"tokenizer.json has a decoder that is not supported: {other}")
        return rule

    def bytes_of(self, piece: str) -> bytes:
        """Bytes that a vocabulary entry stands for."""
        if self.byte_level:
            if all(c in _GLYPHS for c in piece):
                return bytes(_GLYPHS[c] for c in piece)
            return piece.encode()
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        if self.byte_fallback and (found := _BYTE_FALLBACK.match(piece)):
            return bytes([int(found[1], 16)])
        return piece.encode()


class Tokenizer:
    """Ids are those of the checkpoint. Thread-safe: nothing changes after construction but a cache of token bytes."""

    def __init__(self, inner: tokenizers.Tokenizer, config: dict[str, Any], chat_template: str | None = None) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        decoder = json.loads(inner.to_str())["decoder"]
        self.rule = ByteRule.from_json(decoder)
        self._added = inner.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_tokens = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))}
        self.chat_template = chat_template
        self._bytes: dict[int, bytes] = {}
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        leading = inner.encode("", add_special_tokens=True).ids
        self._prepend_bos = bool(config.get("add_bos_token")) and self.bos_token_id not in leading[:1]
        self.adds_bos = self.bos_token_id is not None and (self._prepend_bos or leading[:1] == [self.bos_token_id])

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads ``tokenizer.json``, ``tokenizer_config.json`` (optional) and ``chat_template.jinja`` (optional, before
        the config's own template). Raises ValueError naming the file that is missing or unreadable."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path} is missing: convert the checkpoint again, with its tokenizer")
        try:
            inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:
            raise ValueError(f"{path} is not a tokenizer that `tokenizers` can read: {error}") from error
        config_path = folder / "tokenizer_config.json"
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        template_path = folder / "chat_template.jinja"
        if template_path.is_file():
            template = template_path.read_text(encoding="utf-8")
        else:
            template = _config_template(config.get("chat_template"))
        return cls(inner, config, template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. With ``add_special_tokens`` the tokenizer's BOS comes first, once, even when the text spells
        it out itself. Lone surrogates read as U+FFFD."""
        if _has_surrogate(text):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        # A batch of one: ``encode`` would hold the interpreter all the while, so that a long text stops every thread.
        ids = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens and self.adds_bos:
            bos = self.bos_token_id
            if self._prepend_bos and ids[:1] != [bos]:
                ids = [bos, *ids]
            elif ids[:2] == [bos, bos]:
                ids = ids[1:]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The whole text of ``ids``; the incremental detokeniser's deltas add up to exactly this."""
        raw = b"".join(self.token_bytes(i) for i in ids if not (skip_special_tokens and i in self.special_ids))
        if self.rule.strips_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for: part of a character, or its spelling for a special token; ``b""`` for an id
        past the tokenizer's vocabulary (models pad theirs)."""
        known = self._bytes.get(token_id)
        if known is None:
            added = self._added.get(token_id)
            piece = self._inner.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            if piece is None:
                known = b""
            elif added is not None and (added.special or self.rule.byte_level):
                known = added.content.encode()
            else:
                known = self.rule.bytes_of(piece)
            self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """A token's label in logprobs: its text, or ``bytes:\\xf0\\x9f`` for part of a character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def token_id(self, piece: str) -> int | None:
        """Id of a vocabulary entry spelled as ``tokenizer.json`` spells it."""
        return self._inner.token_to_id(piece)

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._inner.token_to_id(text)


def _has_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)


def _token_text(value: Any) -> str | None:
    """``tokenizer_config.json`` writes a special token as a string or as ``{"content": ...}``."""
    return value.get("content") if isinstance(value, dict) else value


def _config_template(value: str | Sequence[dict[str, str]] | None) -> str | None:
    """A template, or a list of named ones of which the default is ours."""
    if value is None or isinstance(value, str):
        return value
    named = {entry["name"]: entry["template"] for entry in value}
    return named.get(_MULTIPLE_TEMPLATES_DEFAULT)
