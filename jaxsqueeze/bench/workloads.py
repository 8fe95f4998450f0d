"""Workloads: which requests arrive when, with how many tokens, and the prompts of those lengths.

A workload carries lengths and arrival times only, so the same one drives a remote server and the offline engine; the
prompts are made afterwards by a ``Corpus`` (token ids, or words for a server whose tokenizer is out of reach).
Sources: the Azure LLM inference trace (CSV: TIMESTAMP, ContextTokens, GeneratedTokens), the Mooncake trace (JSONL:
timestamp in ms, input_length, output_length, hash_ids, one id per 512-token block of the prompt), or synthetic.

Units: arrivals are seconds from the start of the run, lengths are tokens. ``length_scale`` multiplies lengths (0.1:
ten times shorter) and ``time_scale`` multiplies the gaps between arrivals (0.1: ten times faster traffic).
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

MOONCAKE_BLOCK_TOKENS = 512  # prompt tokens that one hash id stands for, fixed by the trace's format
SPAN_UNITS = 8  # a block's text is pasted from spans of this many units, so that different ids give different text
WORDS_PER_TOKEN = 0.75  # English prose under common BPE vocabularies; only where the tokenizer is out of reach

# Enough for prose-shaped filler when no --text is given.
FILLER_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man "
    "water house small river light morning road winter garden stone letter music paper field north glass table summer "
    "market bridge forest machine engine memory signal number school doctor captain village mountain kitchen window "
    "history science language evening silver copper harbour station journey promise answer question reason subject"
)


@dataclasses.dataclass(frozen=True)
class Item:
    """One request of a workload. ``block_ids``: the prompt is these blocks of ``block_tokens`` tokens, the last cut to
    ``input_tokens``; empty: the prompt is a passage of its own."""

    arrival: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Workload:
    """``description`` names the source and every factor applied, for the report."""

    description: str
    items: tuple[Item, ...]

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError(f"the workload has no requests ({self.description})")


def scale_length(tokens: int, scale: float) -> int:
    """At least one token: a request of nothing is not a request."""
    return max(1, round(tokens * scale))


def load_trace(
    path: Path,
    *,
    length_scale: float = 1.0,
    time_scale: float = 1.0,
    limit: int | None = None,
    max_total_tokens: int | None = None,
) -> Workload:
    """Reads the first ``limit`` requests of an Azure ``.csv`` or Mooncake ``.jsonl`` trace.

    Requests whose scaled prompt and output exceed ``max_total_tokens`` are left out and counted in the description.
    Raises ValueError naming the file, the line and what is wrong.
    """
    for name, value in (("length-scale", length_scale), ("time-scale", time_scale)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"--{name} must be positive, got {value}")
    readers = {".csv": _azure_rows, ".jsonl": _mooncake_rows}
    if path.suffix not in readers:
        raise ValueError(f"{path} is no known trace: give an Azure .csv or a Mooncake .jsonl file")
    try:
        rows = list(itertools.islice(readers[path.suffix](path, length_scale), limit))
    except OSError as error:
        raise ValueError(f"cannot read the trace {path}: {error.strerror or error}") from error
    first = rows[0].arrival if rows else 0.0
    items = [dataclasses.replace(row, arrival=(row.arrival - first) * time_scale) for row in rows]
    kept = [x for x in items if max_total_tokens is None or x.input_tokens + x.output_tokens <= max_total_tokens]
    left_out = f", {len(items) - len(kept)} longer than {max_total_tokens} tokens left out" if max_total_tokens else ""
    return Workload(
        f"{path.name}: {len(kept)} requests, lengths x {length_scale:g}, time x {time_scale:g}{left_out}", tuple(kept)
    )


def _azure_rows(path: Path, scale: float) -> Iterator[Item]:
    with path.open(newline="", encoding="utf-8") as file:
        for row in (reader := csv.DictReader(file)):
            try:
                # The trace has seven decimals of a second; datetime takes six and drops the rest.
                when = datetime.datetime.fromisoformat(row["TIMESTAMP"]).replace(tzinfo=datetime.UTC)
                prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: no Azure trace row ({error})") from error
            yield Item(when.timestamp(), scale_length(prompt, scale), scale_length(output, scale))


def _mooncake_rows(path: Path, scale: float) -> Iterator[Item]:
    block = scale_length(MOONCAKE_BLOCK_TOKENS, scale)
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                arrival, prompt, output = row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"])
                ids = tuple(int(x) for x in row["hash_ids"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: no Mooncake trace row ({error})") from error
            whole = max(0, len(ids) - 1)
            if not ids or not 0 < prompt - whole * MOONCAKE_BLOCK_TOKENS <= MOONCAKE_BLOCK_TOKENS:
                raise ValueError(f"{path}, line {number}: {len(ids)} hash_ids do not cover input_length {prompt}")
            # Whole blocks keep one common scaled size, or equal ids would not line up into equal prefixes.
            last = min(block, scale_length(prompt - whole * MOONCAKE_BLOCK_TOKENS, scale))
            yield Item(arrival, whole * block + last, scale_length(output, scale), ids, block)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A distribution of token counts: ``64``, ``uniform:LOW:HIGH`` or ``lognormal:MEDIAN:SIGMA``."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises ValueError with the text that is no distribution."""
        kind, _, rest = text.partition(":")
        try:
            if not rest:
                lengths = cls("fixed", int(text))
            elif kind in ("uniform", "lognormal"):
                first, second = (float(x) for x in rest.split(":"))
                lengths = cls(kind, first, second)
            else:
                raise ValueError(kind)
        except ValueError as error:
            raise ValueError(
                f"{text!r} is no length distribution: give N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"
            ) from error
        if lengths.first < 1 or lengths.second < 0 or (kind == "uniform" and lengths.second < lengths.first):
            raise ValueError(f"lengths must be at least 1 token and in order, got {text!r}")
        return lengths

    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """i64[count], each >= 1."""
        if self.kind == "fixed":
            return np.full(count, int(self.first))
        if self.kind == "uniform":
            return rng.integers(int(self.first), int(self.second) + 1, count)
        return np.maximum(1, np.rint(self.first * np.exp(self.second * rng.standard_normal(count)))).astype(np.int64)

    def __str__(self) -> str:
        return f"{self.first:g}" if self.kind == "fixed" else f"{self.kind}:{self.first:g}:{self.second:g}"


def synthetic(
    num_requests: int, input_tokens: Lengths, output_tokens: Lengths, *, rate: float | None = None, seed: int = 0
) -> Workload:
    """Poisson arrivals at ``rate`` requests per second; None: all at once."""
    if num_requests < 1:
        raise ValueError(f"--num-requests must be at least 1, got {num_requests}")
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"--rate must be positive, got {rate}")
    rng = np.random.default_rng(seed)
    prompts = input_tokens.sample(rng, num_requests)
    outputs = output_tokens.sample(rng, num_requests)
    gaps = np.zeros(num_requests) if rate is None else rng.exponential(1 / rate, num_requests)
    arrivals = np.cumsum(gaps) - gaps[0]  # the first request starts the clock
    items = tuple(Item(float(a), int(p), int(o)) for a, p, o in zip(arrivals, prompts, outputs, strict=True))
    when = "no pauses" if rate is None else f"Poisson {rate:g}/s"
    return Workload(
        f"synthetic: {num_requests} requests, {when}, input {input_tokens}, output {output_tokens}, seed {seed}", items
    )


class Corpus:
    """A long sequence of units (token ids, or words) from which prompts of exact lengths are cut.

    Passages start at different places as long as there are places left, so two prompts share a prefix only where the
    workload says so. ``units_per_token`` is 1 for ids.
    """

    def __init__(self, units: Sequence[int] | Sequence[str], *, units_per_token: float = 1.0, seed: int = 0) -> None:
        if len(units) < 2:
            raise ValueError("the text is too short to make prompts from")
        self.units = list(units)
        self.units_per_token = units_per_token
        self.seed = seed
        self._starts = np.random.default_rng([seed, 0]).permutation(len(units))

    @classmethod
    def random_ids(cls, vocab_size: int, *, size: int = 65536, seed: int = 0) -> Corpus:
        """Uniform ids over the upper part of the vocabulary: the lowest ids are control tokens in most tokenizers."""
        low = min(256, vocab_size // 2)
        ids = np.random.default_rng([seed, 1]).integers(low, vocab_size, size)
        return cls([int(x) for x in ids], seed=seed)

    def prompt(self, index: int, item: Item) -> list[int] | str:
        """The prompt of request ``index``: ids if the corpus holds ids, else text."""
        if item.block_ids:
            blocks = [self._block(h, self._count(item.block_tokens)) for h in item.block_ids]
            units = list(itertools.chain.from_iterable(blocks))
        else:
            units = self._run(int(self._starts[index % len(self._starts)]), self._count(item.input_tokens))
        units = units[: self._count(item.input_tokens)]
        return units if isinstance(units[0], int) else " ".join(units)

    def _count(self, tokens: int) -> int:
        return max(1, round(tokens * self.units_per_token))

    def _run(self, start: int, count: int) -> list:
        """``count`` units from ``start``, going round at the end."""
        size = len(self.units)
        return [self.units[(start + i) % size] for i in range(count)]

    def _block(self, hash_id: int, count: int) -> list:
        """The fixed text of one hash id."""
        rng = np.random.default_rng([self.seed, 2, hash_id])
        starts = rng.integers(0, len(self.units), -(-count // SPAN_UNITS))
        return list(itertools.chain.from_iterable(self._run(int(s), SPAN_UNITS) for s in starts))[:count]


def text_words(path: Path | None, *, seed: int = 0) -> list[str]:
    """Words of a text file, or filler from the built-in list."""
    if path is None:
        return np.random.default_rng([seed, 3]).choice(FILLER_WORDS.split(), 50_000).tolist()
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the text file {path}: {error}") from error
