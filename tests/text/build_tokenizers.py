"""Small real tokenizers made with the ``tokenizers`` library: the kinds that checkpoints carry."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the dog sleeps",
    "London is a city, and the City of London is a part of London",
    "hello world, hello there; one two three four five six seven",
    "def f(x):\n    return x + 1\n\n",
    "是的，我们在这里。café naïve",
    "是 是 是 是",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(vocab_size: int = 420) -> tokenizers.Tokenizer:
    """GPT-2's kind: every byte is a token, ``Ġ`` spells a space."""
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(CORPUS, trainer)
    return tok


def sentencepiece(bos: bool = True) -> tokenizers.Tokenizer:
    """Llama 2's kind: ``▁`` spells a space, a dummy space before a text, bytes as ``<0xHH>``."""
    pieces = [f"<0x{b:02X}>" for b in range(256)]
    words = ["▁", "▁the", "▁leading", "▁x", "▁London", "Lon", "don", "▁Hello", "▁world", ",", "!", "\n"]
    letters = list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:;?'()|")
    vocab: dict[str, int] = {}
    merges: list[tuple[str, str]] = []
    for piece in [*SPECIAL, *pieces, *letters, "▁", ",", "!", "\n"]:
        vocab.setdefault(piece, len(vocab))
    for word in words:  # merges that build each word from the left
        for end in range(2, len(word) + 1):
            left, right = word[: end - 1], word[end - 1]
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((left, right))
    tok = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tok.add_special_tokens(SPECIAL)
    if bos:
        tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return tok


def unigram() -> tokenizers.Tokenizer:
    """SentencePiece unigram with a Metaspace decoder."""
    tok = tokenizers.Tokenizer(models.Unigram())
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tok.train_from_iterator(CORPUS, trainer)
    return tok


def write_folder(folder: Path, tok: tokenizers.Tokenizer, **config: object) -> Path:
    """What a converted folder holds of a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
