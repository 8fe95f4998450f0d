"""The part of ``jaxsqueeze convert`` that judges what it made: flags, checks, and the exit code 3 of a refusal."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxsqueeze.checkpoint.source import Report, SourceError

if TYPE_CHECKING:
    from jaxsqueeze.checkpoint.convert import Judge
    from jaxsqueeze.checkpoint.manifest import Manifest
    from jaxsqueeze.quant.scheme import Scheme
    from jaxsqueeze.report.quality.gate import Limits

REFUSED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    gate = parser.add_argument_group("quality", "measured on the CPU before OUT takes its place")
    gate.add_argument(
        "--text", metavar="FILE", type=Path, help="UTF-8 text to compare with the unquantised model on; stored in OUT"
    )
    gate.add_argument("--max-tokens", metavar="N", type=int, help="tokens of the text that are read; default: all")
    gate.add_argument("--max-tail-kl", metavar="NATS", type=float, help="refuse a KL p99.9 above this")
    gate.add_argument(
        "--max-rare-flips", metavar="SHARE", type=float, help="refuse more flips of sure rare tokens, like 0.005"
    )
    gate.add_argument(
        "--auto-mixed", action="store_true", help="past a limit: store the costliest weights in int8 until it holds"
    )


def limits(args: argparse.Namespace) -> Limits:
    """What the flags ask. SourceError for flags that do not go together."""
    from jaxsqueeze.bench.plot import require_matplotlib
    from jaxsqueeze.report.quality.gate import Limits

    try:
        found = Limits(args.max_tail_kl, args.max_rare_flips)
        if args.text is not None:
            require_matplotlib()
    except ValueError as error:
        raise SourceError(str(error)) from error
    if args.text is None and (found or args.auto_mixed or args.max_tokens is not None):
        raise SourceError(
            "--max-tail-kl, --max-rare-flips, --auto-mixed and --max-tokens are about a text; give --text FILE"
        )
    if args.auto_mixed and not found:
        raise SourceError("--auto-mixed works towards a limit; give --max-tail-kl or --max-rare-flips")
    if args.max_tokens is not None and args.max_tokens < 2:
        raise SourceError(f"--max-tokens must be >= 2, got {args.max_tokens}")
    return found


def judged(
    args: argparse.Namespace,
    limits: Limits,
    schemes: Mapping[str, Scheme],
    out: Path,
    convert: Callable[[Mapping[str, Scheme], Judge], Manifest],
    report: Report,
) -> int:
    """Converts with ``convert(raised, judge)``, as often as the limits and --auto-mixed ask, and says what it found.
    ``schemes``: what is quantised at first. The reference is converted into the cache if it is not there."""
    from rich.console import Console

    from jaxsqueeze.checkpoint.convert import calibration_folder, check_place
    from jaxsqueeze.checkpoint.ensure import ensure_converted
    from jaxsqueeze.report.quality import render
    from jaxsqueeze.report.quality.gate import Gate, Refused, convert_within, narrow

    try:
        text = args.text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{args.text}: not UTF-8 ({error.reason}); give a text file") from error
    check_place(out, args.force)
    if not schemes:
        raise SourceError("--text compares quantised weights with the unquantised; choose --weights int8 or int4")
    if args.auto_mixed and not narrow(schemes):
        raise SourceError("--auto-mixed stores weights in int8, and all are; choose --weights int4")
    reference = ensure_converted(args.source, args.dtype, report, weights="bf16")
    kept = out.with_name(f"{out.name}.report")
    gate = Gate(reference, text, args.max_tokens, limits, kept, args.calibration is not None, report)
    say = functools.partial(print, flush=True)
    try:
        manifest = convert_within(lambda raised: convert(raised, gate.judge), args.auto_mixed, say)
    except Refused as refused:
        Console(width=120).print(render.costs_table(refused.costs))
        worst = ", ".join(cost.name for cost in refused.costs[:3])
        work = calibration_folder(out)
        goes_on = f", its calibration in {work} for another try" if work.is_dir() else ""
        print(
            f"refused: {refused}; {out} is not published, the report is in {kept}{goes_on}; most is lost in {worst}",
            file=sys.stderr,
        )
        return REFUSED
    print(f"{manifest.weights}: {render.headline(manifest.quality)} (report: {kept})")
    return 0
