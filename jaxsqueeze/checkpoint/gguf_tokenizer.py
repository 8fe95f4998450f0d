"""GGUF tokenizer metadata to Hugging Face tokenizer files: ``tokenizer.json`` and ``tokenizer_config.json``.

Two kinds exist in the field. ``gpt2``: byte-level BPE with its merges written out. ``llama``: SentencePiece BPE, where
only scores are stored; the merge of two pieces ranks by the score of what it makes, and unknown characters fall back
to byte pieces. Pieces that are "user defined" are found in the raw text first (longest match) and never merge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from jaxsqueeze.checkpoint.gguf_pretokenizers import KNOWN, bpe_style
from jaxsqueeze.checkpoint.source import SourceError

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"  # SentencePiece writes a space so
# Control tokens by which chat models end a turn; one of them ends generation if the chat template writes it.
_TURN_ENDS = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>"})


def tokenizer_files(path: object, metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """File name to content. SourceError for a tokenizer that cannot be turned into a ``tokenizers`` one."""
    model = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata:
        raise SourceError(f"{path}: has no tokenizer; use a GGUF file that carries one")
    if model not in ("gpt2", "llama"):
        raise SourceError(f"{path}: tokenizer model {model!r} is not supported; supported: gpt2, llama")
    try:
        tokenizer, adds_bos = _byte_level(path, metadata) if model == "gpt2" else _sentence_piece(metadata)
    except SourceError:
        raise
    except Exception as error:  # the tokenizers package raises nothing narrower
        raise SourceError(f"{path}: its tokenizer is damaged ({error!r}); download this file again") from error
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    adds_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    _set_post_processor(tokenizer, metadata, model, adds_bos, adds_eos)
    config = _config(metadata, adds_bos, adds_eos)
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
    }


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that end generation: EOS, end of turn, end of message, and the turn end that the chat template writes."""
    ids = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template") or ""
    tokens, kinds = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    ids += [
        i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and token in _TURN_ENDS and token in template
    ]
    return sorted({int(i) for i in ids if i is not None})


def _byte_level(path: object, metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    style = bpe_style(pre, metadata.get("general.architecture", ""), len(vocab))
    if style is None:
        raise SourceError(f"{path}: tokenizer pre-split {pre!r} is not known; known: {KNOWN}")
    # A merge is "left right"; byte-level pieces hold no spaces, so the space after the first character divides them.
    merges = [tuple(m.split(" ", 1)) for m in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=style.ignore_merges))
    if (normalizer := style.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = style.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added_tokens(metadata, metadata["tokenizer.ggml.tokens"]))
    return tokenizer, style.adds_bos


def _sentence_piece(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokens = list(metadata["tokenizer.ggml.tokens"])
    if not prefix:  # GGUF writes user-defined runs of spaces as plain spaces
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
            if kind == _USER_DEFINED and not token.strip(" "):
                tokens[i] = _SPACE * len(token)
    scores = metadata["tokenizer.ggml.scores"].tolist()
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, kinds, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    tokenizer.add_tokens(_added_tokens(metadata, tokens))
    return tokenizer, True


def _merges(vocab: Mapping[str, int], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a normal piece of two others, best score first; equal scores in order of the parts' ids."""
    ranked = []
    for piece, i in vocab.items():
        if kinds[i] != _NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None and kinds[left] == kinds[right] == _NORMAL:
                ranked.append((-scores[i], i, left, right, piece[:cut], piece[cut:]))
    ranked.sort(key=lambda m: m[:4])
    return [(left, right) for *_, left, right in ranked]


def _added_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> list[AddedToken]:
    """Control tokens (special) and user-defined ones (plain text), matched before anything else; those with spaces are
    matched where SentencePiece matches them, in the text whose spaces are written as its space sign."""
    kinds = metadata.get("tokenizer.ggml.token_type")
    kinds = [_NORMAL] * len(tokens) if kinds is None else kinds.tolist()
    return [
        AddedToken(
            token,
            special=kind in (_CONTROL, _UNKNOWN),
            normalized=kind == _USER_DEFINED and not token.strip(_SPACE),
        )
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) and token
    ]


def _set_post_processor(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], model: str, adds_bos: bool, adds_eos: bool
) -> None:
    byte_level = [processors.ByteLevel(trim_offsets=False)] if model == "gpt2" else []
    bos = _token(metadata, "bos") if adds_bos else None
    eos = _token(metadata, "eos") if adds_eos else None
    if bos or eos:
        ids = {t: i for t, i in (bos, eos) if t} if bos and eos else dict([bos or eos])
        before, after = ([bos[0]] if bos else []), ([eos[0]] if eos else [])
        template = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{t}:1" for t in before), "$B:1", *(f"{t}:1" for t in after)],
            special_tokens=list(ids.items()),
        )
        byte_level.append(template)
    if byte_level:
        tokenizer.post_processor = byte_level[0] if len(byte_level) == 1 else processors.Sequence(byte_level)


def _token(metadata: Mapping[str, Any], role: str) -> tuple[str, int] | None:
    i = metadata.get(f"tokenizer.ggml.{role}_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    return (tokens[i], i) if i is not None and 0 <= i < len(tokens) else None


def _config(metadata: Mapping[str, Any], adds_bos: bool, adds_eos: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        "clean_up_tokenization_spaces": False,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        if token := _token(metadata, role):
            config[f"{key}_token"] = token[0]
    named = {
        key.removeprefix("tokenizer.chat_template."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.chat_template.")
    }
    default = metadata.get("tokenizer.chat_template")
    if named and default:
        config["chat_template"] = [
            {"name": name, "template": template} for name, template in {"default": default, **named}.items()
        ]
    elif default:
        config["chat_template"] = default
    return config
