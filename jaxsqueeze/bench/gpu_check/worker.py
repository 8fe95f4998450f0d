"""The process of one part: runs its cases in order and writes what happens, a line of JSON each.

    {"case": name, "state": "started"}
    {"case": name, "state": "done", "seconds": s, ...figures}
    {"case": name, "state": "not covered" | "failed", "reason": text}

The supervisor reads the lines as they come: it learns from the last one what a process that died was doing.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import jax

from jaxsqueeze.bench.gpu_check.case import Case, Setting
from jaxsqueeze.bench.gpu_check.supervisor import BROKEN
from pallas_kernels.target import Target

# What CUDA says of every call after a kernel has broken the context.
_LOST = ("ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "LAUNCH_FAILED", "ILLEGAL_INSTRUCTION", "HARDWARE_STACK_ERROR")


def main(module: str, log: str, out: str, quick: str, batch: str, skip: str) -> None:
    """Runs the cases of ``module`` that the JSON list ``skip`` does not name. ``quick``: "quick" or ""; ``batch``: how
    many cases are compiled together."""
    target = Target.of(jax.devices()[0])
    if target.platform == "cpu" and not quick:
        sys.exit("jax sees no GPU here: see that nvidia-smi lists one and jax has its CUDA plug-in, or give --quick")
    setting = Setting(target, bool(quick), Path(out))
    known = set(json.loads(skip))
    with open(log, "a", encoding="utf-8") as lines:
        cases = [c for c in importlib.import_module(module).cases(setting) if c.name not in known]
        write(lines, state="listed", cases=[c.name for c in cases], device=target.kind)
        for i in range(0, len(cases), int(batch)):
            run(cases[i : i + int(batch)], lines)


def run(batch: list[Case], lines: TextIO) -> None:
    """Compiles all, then runs one after another: compiling may measure, and nothing else may run beside what is timed.
    Exits the process where the device context is lost."""
    if len(batch) == 1:
        write(lines, case=batch[0].name, state="started")
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        prepared = [threads.submit(case.prepare) for case in batch]
    for i, case in enumerate(batch):
        write(lines, case=case.name, state="started")
        begin = time.perf_counter()
        try:
            figures = case.run(prepared[i].result())
        except NotImplementedError as error:
            write(lines, case=case.name, state="not covered", reason=str(error))
        except Exception as error:  # a compiler or the device runtime may raise anything
            write(lines, case=case.name, state="failed", reason=reason(error))
            if any(word in str(error) for word in _LOST):
                os._exit(BROKEN)  # nothing more works here, not even an orderly end
        else:
            write(lines, case=case.name, state="done", seconds=round(time.perf_counter() - begin, 2), **figures)
        prepared[i] = None  # its programs and arrays are let go


def write(lines: TextIO, **entry: Any) -> None:
    lines.write(json.dumps(entry) + "\n")
    lines.flush()


def reason(error: BaseException) -> str:
    """One line: the last of the message that says something, as a traceback ends."""
    text = [line.strip() for line in str(error).splitlines() if line.strip().strip("-")]
    text = [line for line in text if "JAX has removed its internal frames" not in line] or [""]
    return f"{type(error).__name__}: {text[0]}"[:400]


if __name__ == "__main__":
    main(*sys.argv[1:])
