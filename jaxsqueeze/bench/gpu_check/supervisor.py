"""Runs the parts one after another, each in a process of its own, within a time. Needs no jax.

A process that dies, hangs or loses its device context costs the case that it was at: that one is noted as failed, and
a new process goes on with the next. One that dies while it compiles several cases at once is followed by processes
that compile one by one. A part that needs too many processes is given up.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[3]  # found by the worker without being installed
BATCH = 16  # cases that are compiled together
STARTS = 8  # of processes for one part
POLL_S = 0.1
START_S = 60.0  # a process may take to its first line
BROKEN = 70  # exit code of a worker whose device context is lost
OUT_OF_TIME = "out of time"


@dataclasses.dataclass(frozen=True)
class Part:
    """``seconds``: at most, of the whole part; ``stall_s``: of one case; ``flags``: added to XLA_FLAGS."""

    name: str
    module: str
    seconds: float
    stall_s: float
    flags: str = ""


@dataclasses.dataclass
class Outcome:
    """``results``: the worker's last line of each case, in order; ``device``: its kind; ``note``: why the part ended
    early."""

    results: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    device: str = ""
    seconds: float = 0.0
    note: str = ""


def run(part: Part, out: Path, *, quick: bool, deadline: float, say: Callable[[str], None]) -> Outcome:
    """``deadline``: by ``time.monotonic``; ``say``: gets a line for each case that ends."""
    outcome, begin, batch = Outcome(), time.monotonic(), BATCH
    end = min(deadline, begin + part.seconds)
    results = outcome.results
    for _ in range(STARTS):
        why, code = _process(part, out, quick, batch, end, outcome, say)
        at = next((name for name, result in results.items() if result["state"] == "started"), None)
        waiting = any(result["state"] == "waiting" for result in results.values())
        if why == OUT_OF_TIME or (at is None and not waiting):  # at its end, or before it had cases
            outcome.note = why if why == OUT_OF_TIME or not results else ""
            break
        if at is not None:
            results[at] = {"state": "failed", "reason": why}
            say(f"{at}: failed: {why}")
        elif code != BROKEN and batch == 1:  # between two cases
            outcome.note = why
            break
        elif code != BROKEN:
            batch = 1
            say(f"{part.name}: {why}")
    else:
        outcome.note = f"given up after {STARTS} processes"
    for name, result in results.items():
        if result["state"] in ("waiting", "started"):
            results[name] = {"state": "skipped", "reason": outcome.note}
    outcome.seconds = time.monotonic() - begin
    return outcome


def _process(
    part: Part, out: Path, quick: bool, batch: int, end: float, outcome: Outcome, say: Callable[[str], None]
) -> tuple[str, int]:
    """One worker, until it ends or is ended: why ("" if all is well), and its exit code."""
    finished = [name for name, result in outcome.results.items() if result["state"] != "waiting"]
    log, errors = out / f"{part.name}.jsonl", out / f"{part.name}.err"
    arguments = [part.module, str(log), str(out), "quick" if quick else "", str(batch), json.dumps(finished)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if part.flags:
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {part.flags}".strip()
    log.write_text("")
    with errors.open("w") as stderr, log.open(encoding="utf-8") as lines:
        worker = subprocess.Popen(
            [sys.executable, "-m", "jaxsqueeze.bench.gpu_check.worker", *arguments],
            env=environment, stdout=stderr, stderr=stderr,
        )  # fmt: skip
        try:
            why = _watch(part, worker, lines, end, outcome, say)
        finally:
            worker.kill()
            code = worker.wait()
    if not why and code:
        why = f"the process ended with code {code}: {_last_line(errors)}"
    log.unlink()
    if not errors.stat().st_size:
        errors.unlink()
    return why, code


def _watch(
    part: Part, worker: subprocess.Popen, lines: TextIO, end: float, outcome: Outcome, say: Callable[[str], None]
) -> str:
    """Takes in the worker's lines until it has ended, or must be: then says why."""
    heard, text, allowed = time.monotonic(), "", max(START_S, part.stall_s)
    while True:
        ended = worker.poll() is not None
        text += lines.read()
        *whole, text = text.split("\n")
        for line in whole:
            _take(json.loads(line), outcome, say)
            heard, allowed = time.monotonic(), part.stall_s
        if ended:
            return ""
        if time.monotonic() > end:
            return OUT_OF_TIME
        if time.monotonic() - heard > allowed:
            return f"nothing happened for {allowed:g} s"
        time.sleep(POLL_S)


def _take(entry: dict[str, Any], outcome: Outcome, say: Callable[[str], None]) -> None:
    if entry["state"] == "listed":
        outcome.device = entry["device"]
        outcome.results.update({name: {"state": "waiting"} for name in entry["cases"]})
        return
    name = entry.pop("case")
    outcome.results[name] = entry
    if entry["state"] != "started":
        say(f"{name}: {entry['state']}" + (f": {entry['reason']}" if "reason" in entry else ""))


def _last_line(errors: Path) -> str:
    lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "without a word"
