"""How GGUF's ``tokenizer.ggml.pre`` splits text before byte-pair merging, as ``tokenizers`` pre-tokenizers.

GGUF stores only a name; the split itself is the published one of each model's own tokenizer. A wrong split gives
other ids for the same text and worse answers, with no error: so an unknown name is refused, never guessed.
"""

from __future__ import annotations

import dataclasses

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
# Words split where lower case turns to upper.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PUNCT = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_PUNCT}|{_TAIL}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_PUNCT}|{_TAIL}"
)


@dataclasses.dataclass(frozen=True)
class BpeStyle:
    """``regex`` None: GPT-2's own split. ``ignore_merges``: a word that is a token is taken whole."""

    regex: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False  # when the file does not say

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.regex is not None:
            steps.append(pre_tokenizers.Split(Regex(self.regex), "isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.regex is None))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_LLAMA3_STYLE = BpeStyle(_LLAMA3, ignore_merges=True, adds_bos=True)
_QWEN2_STYLE = BpeStyle(_QWEN2, nfc=True)
_GPT2_STYLE = BpeStyle()
BPE_STYLES: dict[str, BpeStyle] = {
    "smollm": BpeStyle(single_digits=True),
    "llama3": _LLAMA3_STYLE,
    "llama-v3": _LLAMA3_STYLE,
    "llama-bpe": _LLAMA3_STYLE,
    "falcon3": _LLAMA3_STYLE,
    "smaug-bpe": BpeStyle(_LLAMA3),
    "dbrx": BpeStyle(_LLAMA3),
    "qwen2": _QWEN2_STYLE,
    "deepseek-r1-qwen": _QWEN2_STYLE,
    "gpt-2": _GPT2_STYLE,
    "phi-2": _GPT2_STYLE,
    "tekken": BpeStyle(_TEKKEN, ignore_merges=True, adds_bos=True),
    "gpt-4o": BpeStyle(_GPT4O),
}
KNOWN = ", ".join(BPE_STYLES)
_LLAMA3_WORDS = 128_256


def bpe_style(pre: str, architecture: str, words: int) -> BpeStyle | None:
    """The style called ``pre``; None if it is not known. Files from before the name was stored say "default": the
    architecture and the vocabulary's size then tell."""
    if pre == "default":
        pre = "qwen2" if architecture in ("qwen2", "qwen3") else "llama-bpe" if words == _LLAMA3_WORDS else "gpt-2"
    return BPE_STYLES.get(pre)
