"""One comparison from two converted folders and a text to a report, window by window; a run that was killed goes on
where it stopped.

    OUT/windows/<i>.npz   scores of a window, written whole or not at all; dropped when anything about the run differs
    OUT/report.json, report.png
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxsqueeze.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from jaxsqueeze.checkpoint.source import Report, SourceError, quiet
from jaxsqueeze.config import KVDtypes
from jaxsqueeze.report.quality import corpus, render
from jaxsqueeze.report.quality.scoring import Comparison, Subject
from jaxsqueeze.report.quality.summary import summarise
from jaxsqueeze.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Settings:
    """``contexts``: ends of the context buckets, tokens, rising; the last is the length of a window. ``most``: tokens
    of the text that are scored, None: all. ``kv``: of the candidate; the reference keeps its KV unquantised."""

    contexts: tuple[int, ...]
    most: int | None
    kv: KVDtypes


def evaluate(
    candidate: Path, reference: Path, text: str, settings: Settings, out: Path | None, report: Report = quiet
) -> dict[str, Any]:
    """The report (see summary.py) of two converted folders, also written to ``out``. SourceError for models that do not
    share a tokenizer, for a text or windows that are too short or long for them."""
    manifests = read_manifest(candidate), read_manifest(reference)
    _check(manifests, (candidate, reference), settings)
    length = settings.contexts[-1]
    ids, tokens = read_text(reference, text, settings)

    key = _key(candidate, reference, text, settings)
    parts = None if out is None else _parts(out, key)
    scores = []
    comparison = None
    for i, window in enumerate(tokens):
        report("scoring", i, len(tokens))
        file = None if parts is None else parts / f"{i}.npz"
        if file is not None and file.is_file():
            scores.append(dict(np.load(file)))
            continue
        if comparison is None:
            subjects = (reference, KVDtypes()), (candidate, settings.kv)
            comparison = Comparison(*(Subject.load(folder, length, kv, report) for folder, kv in subjects))
        scores.append(comparison.score(window))
        if file is not None:
            partial = file.with_suffix(".partial")
            with partial.open("wb") as stream:
                np.savez(stream, **scores[-1])
            partial.rename(file)
    report("scoring", len(tokens), len(tokens))

    whole = {name: np.concatenate([s[name] for s in scores]) for name in scores[0]}
    targets = np.concatenate([t[1:] for t in tokens])
    context = np.concatenate([np.arange(1, len(t)) for t in tokens])
    rarity = corpus.rarity(ids, manifests[1].config.vocab_size)
    found = {
        "candidate": _name(manifests[0], settings.kv),
        "reference": _name(manifests[1], KVDtypes()),
        "tokens": int(sum(map(len, tokens))),
        **summarise(whole, targets, context, rarity, settings.contexts),
    }
    if out is not None:
        bucket = rarity[targets]
        groups = {name: bucket == corpus.BUCKETS.index(name) for name in (corpus.DECILES[0], *corpus.RARE)}
        render.plot(out / "report.png", found, whole["kl"], groups)
        (out / "report.json").write_text(json.dumps(found, indent=1))
        shutil.rmtree(out / "windows")
    return found


def read_text(reference: Path, text: str, settings: Settings) -> tuple[np.ndarray, list[np.ndarray]]:
    """All ids of ``text`` in the words of ``reference``, i32[n], and the windows that are scored, each i32[n]: a model
    trained with a first token sees it before every one. SourceError for a text or windows that are too short or long,
    and for a model without a tokenizer."""
    manifest = read_manifest(reference)
    _check((manifest,), (reference,), settings)
    bos = manifest.config.bos_token_id
    ids = np.asarray(Tokenizer.load(reference).encode(text, add_special_tokens=False), np.int32)
    try:
        windows = corpus.windows(ids, settings.contexts[-1] - (bos is not None), settings.most)
    except ValueError as error:
        raise SourceError(str(error)) from error
    first = np.array([] if bos is None else [bos], np.int32)
    return ids, [np.concatenate([first, w.tokens]) for w in windows]


def _check(manifests: Sequence[Manifest], folders: Sequence[Path], settings: Settings) -> None:
    files = [(folder / "tokenizer.json") for folder in folders]
    for file in files:
        if not file.is_file():
            raise SourceError(
                f"{file.parent}: has no tokenizer.json, so no text can be scored; convert a checkpoint with one"
            )
    vocabularies = [json.loads(file.read_bytes())["model"]["vocab"] for file in files]
    if any(v != vocabularies[0] for v in vocabularies) or len({m.config.vocab_size for m in manifests}) > 1:
        raise SourceError(f"{folders[0]} and {folders[1]} have different tokenizers; compare models that share one")
    longest = min(m.config.max_position for m in manifests)
    if settings.contexts[-1] > longest:
        raise SourceError(
            f"a context of {settings.contexts[-1]} tokens is past the {longest} of the models; lower --context"
        )


def _key(candidate: Path, reference: Path, text: str, settings: Settings) -> str:
    """What decides the scores."""
    parts = (
        (candidate / MANIFEST).read_bytes(),
        (reference / MANIFEST).read_bytes(),
        text.encode(),
        repr(settings).encode(),
    )
    return hashlib.sha256(b"".join(hashlib.sha256(p).digest() for p in parts)).hexdigest()


def _parts(out: Path, key: str) -> Path:
    folder, mark = out / "windows", out / "windows" / "key"
    if not (mark.is_file() and mark.read_text() == key):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        mark.write_text(key)
    return folder


def _name(manifest: Manifest, kv: KVDtypes) -> str:
    parts = [] if kv == KVDtypes() else [f"KV {kv.k}" if kv.k == kv.v else f"K {kv.k}, V {kv.v}"]
    return f"{manifest.source} ({', '.join([manifest.weights, *parts])})"
