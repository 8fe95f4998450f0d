"""The quality gate: no quantised folder is published without its report, nor past the limits its user set.

    OUT.report/report.json   the report, and where it was past a limit the cost of each weight, worst first
    OUT.report/report.png    its picture (see render.py); both are kept, published or not

``convert_within`` judges the finished folder before it takes its place. With ``auto_mixed`` the weights that cost most
for each byte saved are stored in int8 instead, twice as many at every try, until the limits hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxsqueeze.checkpoint import layout
from jaxsqueeze.checkpoint.manifest import Manifest, read_manifest
from jaxsqueeze.checkpoint.source import DTYPES, Report, SourceError, quiet
from jaxsqueeze.config import KVDtypes
from jaxsqueeze.models.families import tensor_plan
from jaxsqueeze.quant.scheme import Scheme
from jaxsqueeze.report.quality.evaluate import Settings, evaluate, read_text
from jaxsqueeze.report.quality.sensitivity import WeightCost, weight_costs

CONTEXTS = (512, 2048)
WIDER = Scheme("int8")
_COST_TOKENS = 256  # that the cost of each weight is measured on
_TRIES = 5  # from the first weights that are raised, a sixteenth, to all of them


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most that a conversion may cost. Raises ValueError for limits that nothing can meet or pass."""

    tail_kl: float | None = None  # nats: KL p99.9 of all positions
    rare_flips: float | None = None  # share of the rare tokens of which the reference was sure

    def __post_init__(self) -> None:
        if self.tail_kl is not None and not self.tail_kl >= 0:
            raise ValueError(f"--max-tail-kl takes nats, 0 or more, got {self.tail_kl:g}")
        if self.rare_flips is not None and not 0 <= self.rare_flips <= 1:
            raise ValueError(f"--max-rare-flips takes a share from 0 to 1, like 0.005, got {self.rare_flips:g}")

    def __bool__(self) -> bool:
        return self.tail_kl is not None or self.rare_flips is not None

    def exceeded(self, found: Mapping[str, Any]) -> list[str]:
        """What is past its limit in a report, in words. SourceError for a text that cannot tell."""
        past = []
        if self.tail_kl is not None and (kl := found["all"]["kl_p99.9"]) > self.tail_kl:
            past.append(f"KL p99.9 is {kl:.4g} nats, past --max-tail-kl {self.tail_kl:g}")
        if self.rare_flips is not None:
            flips = found["rare"].get("flips")
            if flips is None:
                raise SourceError("the text has no rare token of which the reference is sure; give a longer one")
            if flips > self.rare_flips:
                past.append(f"{flips:.3%} of sure rare tokens flipped, past --max-rare-flips {self.rare_flips:.3%}")
        return past


class Refused(Exception):
    """A conversion past a limit: nothing was published. ``costs``: of its weights, worst first."""

    def __init__(self, manifest: Manifest, past: Sequence[str], costs: Sequence[WeightCost], kept: Path) -> None:
        super().__init__(f"{manifest.weights}: {' and '.join(past)}")
        self.manifest, self.costs, self.kept = manifest, costs, kept


class Gate:
    """Compares conversions of one source with ``reference``, its unquantised conversion, on ``text``, at most ``most``
    tokens of it. ``kept``: the folder of the report; ``calibrated``: the conversions are, which moves scales between
    weights. SourceError for a text that the model cannot be judged on."""

    def __init__(
        self,
        reference: Path,
        text: str,
        most: int | None,
        limits: Limits,
        kept: Path,
        calibrated: bool = False,
        report: Report = quiet,
    ) -> None:
        longest = read_manifest(reference).config.max_position
        contexts = tuple(end for end in CONTEXTS if end <= longest) or (longest,)
        self._settings = Settings(contexts, most, KVDtypes())
        self._reference, self._text, self._limits, self._report = reference, text, limits, report
        self._sample = read_text(reference, text, self._settings)[1][0][:_COST_TOKENS]
        self._costs: list[WeightCost] = []
        self.kept, self._calibrated = kept, calibrated

    def judge(self, folder: Path) -> dict[str, Any]:
        """The report of a converted folder. Raises Refused past a limit."""
        try:
            found = evaluate(folder, self._reference, self._text, self._settings, self.kept, self._report)
        except BaseException:  # a report that is not whole is none
            shutil.rmtree(self.kept / "windows", ignore_errors=True)
            with contextlib.suppress(OSError):
                self.kept.rmdir()
            raise
        manifest, past = read_manifest(folder), self._limits.exceeded(found)
        if past:
            if not self._costs or not narrow(
                manifest.schemes
            ):  # those between are tries: what they ask was answered before
                self._costs = weight_costs(folder, self._reference, self._sample, self._calibrated, self._report)
            costs = [dataclasses.asdict(cost) for cost in self._costs]
            (self.kept / "report.json").write_text(json.dumps({**found, "past": past, "weights": costs}, indent=1))
            raise Refused(manifest, past, self._costs, self.kept)
        return found


def convert_within(
    convert: Callable[[Mapping[str, Scheme]], Manifest], auto_mixed: bool, say: Callable[[str], None]
) -> Manifest:
    """``convert(raised)`` converts and judges, ``raised`` being stored wider. Without ``auto_mixed`` it is called once;
    ``say`` takes lines about tries and their end."""
    raised: dict[str, Scheme] = {}
    ranked: list[tuple[str, ...]] = []
    count = 0  # of them that are raised
    uniform: Mapping[str, Scheme] = {}
    while True:
        try:
            manifest = convert(raised)
        except Refused as refused:
            if not raised:
                ranked, uniform = by_cost_of_a_byte(refused.costs, refused.manifest), refused.manifest.schemes
            if not auto_mixed or count == len(ranked):
                raise
            count = min(len(ranked), 2 * count or -(-len(ranked) // 2 ** (_TRIES - 1)))
            raised = {path: WIDER for paths in ranked[:count] for path in paths}
            say(f"{refused}; trying {len(raised)} of {len(uniform)} weights in {WIDER}")
            continue
        if raised:
            say(f"in {WIDER}: {', '.join(sorted(raised, key=list(uniform).index))}")
            say(mixed_bytes(manifest, uniform))
        return manifest


def narrow(schemes: Mapping[str, Scheme]) -> list[str]:
    """The quantised weights that could be stored wider."""
    return [path for path, scheme in schemes.items() if scheme.format != WIDER.format]


def by_cost_of_a_byte(costs: Sequence[WeightCost], manifest: Manifest) -> list[tuple[str, ...]]:
    """Paths of narrow weights that are raised together, first those whose KL goes with the fewest bytes more."""

    def worth(cost: WeightCost) -> float:
        wide = dict.fromkeys(cost.paths, WIDER)
        more = sum(layout.nbytes(manifest.config, path, DTYPES[manifest.dtype], wide) for path in wide) - cost.num_bytes
        return cost.kl_mean / max(1, more)

    candidates = set(narrow(manifest.schemes))
    ranked = sorted(costs, key=worth, reverse=True)
    return [paths for cost in ranked if (paths := tuple(p for p in cost.paths if p in candidates))]


def weight_bytes(manifest: Manifest, schemes: Mapping[str, Scheme]) -> int:
    """Of the whole model in ``schemes``."""
    dtype = DTYPES[manifest.dtype]
    return sum(layout.nbytes(manifest.config, path, dtype, schemes) for path in tensor_plan(manifest.config))


def mixed_bytes(manifest: Manifest, uniform: Mapping[str, Scheme]) -> str:
    """What a mixed folder takes, beside ``uniform`` schemes and all in int8."""
    wide = dict.fromkeys(narrow(uniform), WIDER)
    mixed, least, most = (weight_bytes(manifest, x) for x in (manifest.schemes, uniform, {**uniform, **wide}))
    return (
        f"weights take {mixed / 1e6:.1f} MB: {(mixed - least) / 1e6:.1f} MB ({mixed / least - 1:.1%}) more than with "
        f"none in {WIDER}, {(most - mixed) / 1e6:.1f} MB less than with all"
    )
