"""GGUF tokenizers: how each pre-split divides text, SentencePiece's rules, special tokens, BOS and EOS, templates."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxsqueeze.checkpoint.gguf_pretokenizers import BPE_STYLES, bpe_style
from jaxsqueeze.checkpoint.gguf_tokenizer import tokenizer_files
from jaxsqueeze.checkpoint.source import SourceError

CONTROL, USER, BYTE, NORMAL, UNKNOWN = 3, 4, 6, 1, 2


def build(metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    files = tokenizer_files("x.gguf", metadata)
    return Tokenizer.from_str(files["tokenizer.json"].decode()), json.loads(files["tokenizer_config.json"])


def pieces(style: str, text: str) -> list[str]:
    """The words a style divides text into, as text."""
    offsets = [span for _, span in BPE_STYLES[style].pre_tokenizer().pre_tokenize_str(text)]
    return [text[a:b] for a, b in offsets]


# Expected divisions by hand, from the published pattern of each tokenizer.
SPLITS = [
    ("gpt-2", "I'm 1234 hé!!  x", ["I", "'m", " 1234", " hé", "!!", " ", " x"]),
    ("gpt-2", "a\n\n b\t", ["a", "\n\n", " b", "\t"]),
    ("gpt-2", "IT'S", ["IT", "'", "S"]),  # contractions in lower case only
    ("smollm", "I'm 1234 x", ["I", "'m", " ", "1", "2", "3", "4", " x"]),
    ("smollm", "v2.0", ["v", "2", ".", "0"]),
    ("llama-bpe", "IT'S 12345 a.b", ["IT", "'S", " ", "123", "45", " a", ".b"]),
    ("llama-bpe", "x\n\n  y", ["x", "\n\n", " ", " y"]),
    ("llama-bpe", "f(x) {\n", ["f", "(x", ")", " {\n"]),
    ("qwen2", "IT'S 123 a", ["IT", "'S", " ", "1", "2", "3", " a"]),
    ("qwen2", "x\r\n y", ["x", "\r\n", " y"]),
    ("tekken", "HelloWORLDx 12 it's", ["Hello", "WORLDx", " ", "1", "2", " it", "'s"]),
    ("tekken", "a/b\n", ["a", "/b", "\n"]),
    ("gpt-4o", "it's camelCase 1234", ["it's", " camel", "Case", " ", "123", "4"]),
]


@pytest.mark.parametrize(("style", "text", "expected"), SPLITS)
def test_how_text_is_divided(style: str, text: str, expected: list[str]) -> None:
    assert pieces(style, text) == expected


def test_unknown_split_is_refused_not_guessed() -> None:
    with pytest.raises(SourceError, match=r"x\.gguf: tokenizer pre-split 'novel' is not known; known: .*qwen2"):
        build({**BYTE_LEVEL, "tokenizer.ggml.pre": "novel"})


@pytest.mark.parametrize(
    ("architecture", "words", "meant"),
    [("qwen2", 10, "qwen2"), ("qwen3", 10, "qwen2"), ("llama", 128_256, "llama-bpe"), ("llama", 10, "gpt-2")],
)
def test_files_from_before_the_name_was_stored(architecture: str, words: int, meant: str) -> None:
    assert bpe_style("default", architecture, words) == BPE_STYLES[meant]


BYTE_LEVEL: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "<tool>", "h", "i", "Ġ", "Ġh", "Ġhi", "hi", "é"],
    "tokenizer.ggml.token_type": np.array([CONTROL, CONTROL, USER, *[NORMAL] * 7]),
    "tokenizer.ggml.merges": ["Ġ h", "h i", "Ġ hi"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}


def test_byte_level() -> None:
    tokenizer, config = build(BYTE_LEVEL)
    assert tokenizer.encode("hi hi").ids == [8, 6, 4]  # "Ġ h" comes before "h i"
    assert tokenizer.encode("hi<s>hi").ids == [8, 0, 8]
    assert tokenizer.encode("hi<tool>hi").ids == [8, 2, 8]
    assert tokenizer.decode([8, 0, 2, 7]) == "hi<tool> hi"  # control tokens are skipped, user-defined ones are text
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert not config["add_bos_token"]


@pytest.mark.parametrize(
    ("style", "ids"),
    [("gpt-2", [6, 4]), ("llama-bpe", [7])],  # Llama 3 takes a word that is a token whole
)
def test_words_that_are_tokens(style: str, ids: list[int]) -> None:
    metadata = {**BYTE_LEVEL, "tokenizer.ggml.pre": style, "tokenizer.ggml.add_bos_token": False}
    assert build(metadata)[0].encode(" hi").ids == ids


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ({}, [8]),
        ({"tokenizer.ggml.add_bos_token": True}, [0, 8]),
        ({"tokenizer.ggml.add_eos_token": True}, [8, 1]),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [0, 8, 1]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [0, 8]),  # its own default
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, [8]),
    ],
)
def test_bos_and_eos(flags: dict[str, Any], ids: list[int]) -> None:
    tokenizer, config = build({**BYTE_LEVEL, **flags})
    assert tokenizer.encode("hi").ids == ids
    assert tokenizer.encode("hi", add_special_tokens=False).ids == [8]
    assert config["add_bos_token"] == (ids[0] == 0)
    assert config["add_eos_token"] == (ids[-1] == 1)


def sentence_piece(**changes: Any) -> dict[str, Any]:
    """Unknown, BOS, user-defined pieces, 256 byte pieces, then normal pieces with scores."""
    scored = {"▁": -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "ab": -1.0, "bc": -0.5, "▁a": -2.0, "abc": -3.0, "▁ab": -4.0}
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "  ", "\n\n", *bytes_, *scored]
    kinds = [UNKNOWN, CONTROL, USER, USER, *[BYTE] * 256, *[NORMAL] * len(scored)]
    scores = [0.0, 0.0, -1000.0, -1000.0, *[0.0] * 256, *scored.values()]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_space_prefix": False,
        **changes,
    }


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


def test_sentence_piece_merges_by_score() -> None:
    tokenizer, config = build(sentence_piece())
    assert tokens(tokenizer, "abc") == ["abc"]  # b c first (-0.5), then a bc
    assert tokens(tokenizer, " ab") == ["▁ab"]
    assert tokens(tokenizer, "ab ba") == ["ab", "▁", "b", "a"]
    assert tokenizer.encode("ab").ids[0] == 1  # BOS by default
    assert config["add_bos_token"]


def test_sentence_piece_falls_back_to_bytes() -> None:
    tokenizer, _ = build(sentence_piece())
    assert tokens(tokenizer, "é😀") == ["<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    for text in ("é😀", "日本 語", "a\tb\x00"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_user_defined_pieces_come_first_and_never_merge() -> None:
    tokenizer, _ = build(sentence_piece())
    assert tokens(tokenizer, "a  ab") == ["a", "▁▁", "ab"]  # two spaces are one piece: no "▁ab" behind it
    assert tokens(tokenizer, "a   ab") == ["a", "▁▁", "▁ab"]  # leftmost, longest
    assert tokens(tokenizer, "a\n\n\nb") == ["a", "\n\n", "<0x0A>", "b"]
    assert tokenizer.decode(tokenizer.encode("a  ab\n\nb").ids) == "a  ab\n\nb"


def test_one_dummy_space_is_added_and_removed() -> None:
    tokenizer, _ = build(sentence_piece(**{"tokenizer.ggml.add_space_prefix": True}))
    assert tokens(tokenizer, "ab") == ["▁ab"]
    assert tokens(tokenizer, " ab") == ["▁", "▁ab"]
    for text in ("ab", " ab", "a b "):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_templates_are_kept() -> None:
    assert "chat_template" not in build(BYTE_LEVEL)[1]
    one = {**BYTE_LEVEL, "tokenizer.chat_template": "{{ bos_token }}ü"}
    assert build(one)[1]["chat_template"] == "{{ bos_token }}ü"
    many = {**one, "tokenizer.chat_template.tool_use": "tools"}
    assert build(many)[1]["chat_template"] == [
        {"name": "default", "template": "{{ bos_token }}ü"},
        {"name": "tool_use", "template": "tools"},
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.model": "bert"},
        {"tokenizer.ggml.merges": ["Ġ zz"]},
        {"tokenizer.ggml.merges": ["nospace"]},
        {"tokenizer.ggml.token_type": np.array([1])},
    ],
)
def test_tokenizers_that_cannot_be_built(changes: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match=r"x\.gguf"):
        build({**BYTE_LEVEL, **changes})
    with pytest.raises(SourceError, match="no tokenizer"):
        build({"tokenizer.ggml.model": "gpt2"})


def test_demo_tokenizer(demo_model: Any) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    config = json.loads((demo_model / "tokenizer_config.json").read_text())
    assert tokenizer.encode("Hello world").ids == [19556, 905]
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids == [1, 4093, 198, 26843, 2]
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
    assert "<|im_start|>" in config["chat_template"]
    assert config["eos_token"] == "<|im_end|>"
