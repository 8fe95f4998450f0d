"""Which implementation and tile of an op is the fastest on the present device, and whether XLA's own code is.

Problems that share a key share an entry of the table (dispatch looks it up by key), so they are measured together:
the choice is the one whose times, each relative to the best of its problem, are the least on average. A candidate
counts only if its results are right for all of them, before it is timed and after.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxsqueeze.bench import kernel_check, kernel_cost, kernel_inputs, timing
from jaxsqueeze.bench.kernel_inputs import CARRIED, Fill
from jaxsqueeze.bench.model_problems import Found
from jaxsqueeze.bench.timing import Timing
from pallas_kernels import dispatch
from pallas_kernels.target import Target

SECONDS = 0.1  # of measurement, each candidate


@dataclasses.dataclass(frozen=True)
class Candidate:
    implementation: str
    tile: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return " ".join((self.implementation, *(f"{name}={value}" for name, value in self.tile)))


XLA = Candidate(dispatch.REFERENCE, ())


@dataclasses.dataclass(frozen=True)
class Result:
    """``times``: of each problem; empty if the candidate is ``wrong``, which says how."""

    candidate: Candidate
    times: tuple[Timing, ...] = ()
    wrong: str = ""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """All candidates of one entry of the table, XLA the first."""

    op: str
    key: str
    results: tuple[Result, ...]

    @property
    def winner(self) -> Result:
        """The quickest one that is right; XLA where nothing else is."""
        right = [r for r in self.results if not r.wrong]
        best = [min(r.times[i].us for r in right) for i in range(len(right[0].times))]
        return min(right, key=lambda r: statistics.mean(t.us / b for t, b in zip(r.times, best, strict=True)))

    @property
    def xla(self) -> Result:
        return self.results[0]

    @property
    def entry(self) -> dict[str, Any]:
        """As tuning.py describes it; microseconds are means over the problems."""
        winner = self.winner
        return {
            "implementation": winner.candidate.implementation,
            "tile": dict(winner.candidate.tile),
            "us": round(microseconds(winner), 2),
            "reference_us": round(microseconds(self.xla), 2),
        }


def microseconds(result: Result) -> float:
    return statistics.mean(t.us for t in result.times)


def groups(found: Iterable[Found]) -> dict[tuple[str, str], list[Any]]:
    """Problems by op and key, in the order in which they come."""
    by_key: dict[tuple[str, str], list[Any]] = {}
    for op, problem in found:
        by_key.setdefault((op, problem.key), []).append(problem)
    return by_key


def candidates(op: str, problems: Sequence[Any], target: Target) -> list[Candidate]:
    """What covers all the problems, but XLA."""
    found: dict[Candidate, None] = {}
    for name in dispatch.IMPLEMENTATIONS.get(target.platform, {}).get(op, ()):
        try:
            tiles = [dispatch.tiles(op, name, problem, target) for problem in problems]
        except NotImplementedError:
            continue
        # A tile that only some of the problems list is no choice for all.
        found |= {
            Candidate(name, tuple(tile.items())): None for tile in tiles[0] if all(tile in others for others in tiles)
        }
    return list(found)


def tune(op: str, problems: Sequence[Any], target: Target) -> Tuned | None:
    """None if there is nothing to choose. Raises what XLA's own code raises, if even that does not run.

    All programs are compiled before the first is timed: compiling may measure too.
    """
    names = [XLA, *candidates(op, problems, target)]
    if len(names) == 1:
        return None
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        loops = {
            (name, i): threads.submit(_build, op, problem, name, target)
            for name in names
            for i, problem in enumerate(problems)
        }
    results = {name: Result(name) for name in names}
    for i, problem in enumerate(problems):
        sets, want = _sets(op, problem), None
        for name in names:
            if results[name].wrong:
                continue
            try:
                run = timing.Run(loops.pop((name, i)).result(), sets)
                want, timed = _measure(op, problem, run, want)
            except Exception as error:  # a compiler or the device runtime may raise anything
                if name == XLA:
                    raise
                first = next(iter(str(error).splitlines()), "")
                results[name] = Result(name, wrong=f"{type(error).__name__}: {first}")
            else:
                results[name] = Result(name, (*results[name].times, timed))
            if CARRIED.get(op):  # what was updated in place is gone
                sets = _sets(op, problem)
    return Tuned(op, problems[0].key, tuple(results.values()))


def _sets(op: str, problem: Any) -> list[timing.Args]:
    copies = timing.copies_needed(kernel_inputs.shapes(op, problem, Fill(0)))
    return [kernel_inputs.make(op, problem, Fill(seed)) for seed in range(copies)]


def _build(op: str, problem: Any, name: Candidate, target: Target) -> timing.Loop:
    args = kernel_inputs.shapes(op, problem, Fill(0))
    copies = timing.copies_needed(args)
    call = functools.partial(dispatch.call, op, name.implementation, problem, dict(name.tile), target)
    floor = kernel_cost.cost(op, problem, Fill(0)).floor_us(target)
    return timing.build(call, args, copies, carried=CARRIED.get(op, 0), floor_us=floor)


def _measure(op: str, problem: Any, run: timing.Run, want: Any) -> tuple[Any, Timing]:
    """``want``: XLA's result; None: this is XLA. Returns it, and the time. Raises ArithmeticError for another one."""

    def check() -> None:
        verdict = kernel_check.compare(op, problem, run.results(), want)
        if not verdict.right:
            raise ArithmeticError(f"{verdict}, against XLA's own code")

    if want is None:
        return jax.tree.map(np.asarray, run.results()), run.time(seconds=SECONDS)
    check()
    timed = run.time(seconds=SECONDS)
    check()  # once more, after thousands of calls: a race shows in one of them
    return want, timed


def check_table(file: Path) -> None:
    """Raises ValueError where ``save`` could not put entries into this table."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=file.parent, prefix=".").cleanup()
        table = json.loads(file.read_text()) if file.is_file() else {}
    except OSError as error:
        raise ValueError(f"cannot write {file}: {error.strerror or error}; give another --out") from error
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}): delete it") from error
    if not isinstance(table, dict):
        raise ValueError(f"{file} is no table of tiles: delete it")


def save(tuned: Tuned, file: Path) -> None:
    """Puts the entry into the table, whole or not at all; the others stay."""
    table = json.loads(file.read_text()) if file.is_file() else {}
    table.setdefault(tuned.op, {})[tuned.key] = tuned.entry
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".") as work:
        part = Path(work) / file.name
        part.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        part.replace(file)
