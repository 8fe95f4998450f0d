"""Tokenizers made from GGUF against transformers reading the same GGUF, on many strings.

Two differences are the reference's, and their strings are left out: it splits SmolLM2's text as GPT-2 does, where that
model's own tokenizer first sets every digit apart; and it lets Gemma's runs of more than 31 spaces merge by score,
where Gemma's own tokenizer takes the longest run first.
"""

from __future__ import annotations

import random
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from jaxsqueeze.checkpoint.gguf_source import GGUFSource

pytestmark = [pytest.mark.parity, pytest.mark.timeout(600)]

TEXTS = [
    "",
    " ",
    "   leading and trailing   ",
    "Hello, world!  foo   bar",
    "\n",
    "\n\n\n a",
    "a\r\nb",
    "\tdef f(x):\n\t\treturn x**2  # comment\n",
    "def foo(a, b):\n    if a > b:\n        return a - b\n    return {'k': [None]}\n",
    "v1.0 3.14159x",
    "日本語のテキスト、漢字とかな",
    "中文，测试。你好世界！",
    "한국어 텍스트",
    "😀😃🏳️‍🌈👩‍👩‍👧‍👦 emoji",
    "cafe\u0301 café e\u0301x n\u0303 A\u030a Å \u212b",
    "مرحبا بالعالم שלום हिन्दी पाठ ไทย Привет",
    "I'm you're he'll WE'VE it's 'S",
    "<b>html</b> <table><tr></tr>",
    "http://x.y/z?a=b&c=d#e foo_bar fooBar FOO_BAR",
    "x\u00a0y\u2009z\u3000w \u200b\u200d\ufeff",
    "𝔘𝔫𝔦 𐍈 \x00\x01\x7f",
    "!!!???... --- *** ###",
    "a" * 100,
    "\n" * 40,
    "\t" * 40,
    "ßẞ ﬁ ﬂ ∑∫√≤≥ → ⇒ \\frac{a}{b} $x^2$",
    '{"json": [true, null, 1e-5]}',
    "Zalgo: h̷̢̛e̸l̵l̶o̷",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "<start_of_turn>user\nHi<end_of_turn>\n<eos><bos> <unused7>",
]


def texts() -> list[str]:
    rng = random.Random(0)
    pools = ["abc XYZ", " \n\t", "0123 .,", "日本é😀", "'sStT’", "_-", "éüñ\u0301\u200d", "가각", "अआ"]
    mixed = ["".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 40))) for _ in range(600)]
    ranges = [(0, 0x7F), (0, 0x2FFF), (0x3000, 0xD7FF), (0xE000, 0x1FFFF)]
    anything = ["".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(1, 20))) for _ in range(300)]
    return TEXTS + mixed + [t for t in anything if "\u2581" not in t]


def compare(path: Path, kept: list[str]) -> None:
    from transformers import AutoTokenizer

    reference: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = Tokenizer.from_str(GGUFSource(path).tokenizer_files()["tokenizer.json"].decode())
    for text in kept:
        expected = reference(text)["input_ids"]
        assert ours.encode(text).ids == expected, text
        assert ours.decode(expected, skip_special_tokens=False) == reference.decode(expected), text


def test_smollm2(demo_gguf: Path) -> None:
    def digits_matter(text: str) -> bool:
        return bool(re.search(r"\s\d", text)) or any(
            unicodedata.category(c).startswith("N") and not c.isascii() for c in text
        )

    kept = [text for text in texts() if not digits_matter(text)]
    assert len(kept) > 400
    compare(demo_gguf, kept)


def test_gemma(gemma_gguf: Path) -> None:
    kept = [text for text in texts() if " " * 32 not in text]
    assert len(kept) > 900
    compare(gemma_gguf, kept)
