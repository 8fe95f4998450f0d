"""``scripts/gpu_check.py``: which parts there are, in which order, and what they may take."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxsqueeze.bench import machine, report
from jaxsqueeze.bench.gpu_check import report as check_report
from jaxsqueeze.bench.gpu_check import supervisor
from jaxsqueeze.bench.gpu_check.supervisor import Outcome, Part
from jaxsqueeze.bench.gpu_check.targets import Target, judge

_MODULES = "jaxsqueeze.bench.gpu_check"
WHILE = "--xla_gpu_enable_command_buffer=+WHILE --xla_gpu_graph_min_graph_size=1"
PARTS = (
    Part("correctness", f"{_MODULES}.correctness", seconds=110, stall_s=60),
    Part("speed", f"{_MODULES}.speed", seconds=150, stall_s=60),
    Part("models", f"{_MODULES}.whole_model", seconds=190, stall_s=150),
    Part("captured", f"{_MODULES}.captured", seconds=120, stall_s=110, flags=WHILE),
)
NAMES = tuple(part.name for part in PARTS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder for the report, logs and a trace")
    parser.add_argument("--part", action="append", choices=NAMES, help="only this one; may be given again")
    parser.add_argument("--minutes", type=float, default=8.0, help="no part begins, and none goes on, after these")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one problem of each kind, as on a CPU")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """0; 1 if a case failed or a part could not begin; 2 for a folder that cannot be made, with a sentence on stderr.
    Whatever goes wrong in one part, the others run and are reported."""
    begin = time.monotonic()
    out = args.out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"gpu_check: cannot make the folder {out}: {error.strerror}; give another --out", file=sys.stderr)
        return 2
    console = report.console()
    results: dict[str, Outcome] = {}
    for part in PARTS:
        if args.part and part.name not in args.part:
            continue
        report.say(console, f"== {part.name} ({time.monotonic() - begin:.0f} s)")
        results[part.name] = supervisor.run(
            part,
            out,
            quick=args.quick,
            deadline=begin + 60 * args.minutes,
            say=lambda line: report.say(console, line),
        )
        about = _machine(argv)
        _write(out, results, about)  # after each part: nothing is lost if the next one takes the machine down
    report.say(console, f"== results ({time.monotonic() - begin:.0f} s)")
    check_report.print_all(console, results, _targets(results))
    report.print_machine(console, about)
    report.say(console, f"all figures: {out / 'gpu_check.json'}")
    cases = [list(outcome.results.values()) for outcome in results.values()]
    return int(any(not part or any(case["state"] == "failed" for case in part) for part in cases))


def _machine(argv: Sequence[str]) -> dict[str, Any]:
    about = machine.describe(argv)
    versions = {name: machine.version_of(name) for name in ("flax", "triton", "jax-cuda13-plugin")}
    about["versions"] |= {name: version for name, version in versions.items() if version}
    return {**about, "command": shlex.join(["python", "scripts/gpu_check.py", *argv])}


def _targets(results: dict[str, Outcome]) -> list[Target]:
    ops, models = (check_report.done(results.get(name)) for name in ("speed", "models"))
    return judge(ops, models, check_report.ceilings(results))


def _write(out: Path, results: dict[str, Outcome], about: dict[str, Any]) -> None:
    report.write_json(out / "gpu_check.json", check_report.as_json(results, _targets(results), about))
