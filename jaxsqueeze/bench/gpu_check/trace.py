"""One profiler trace of decode steps, and what it says of the time spent in kernels.

While a profile is taken XLA launches kernels one by one instead of as command buffers, so the gaps in it are not those
of serving; the kernels' own times are.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import jax

from jaxsqueeze.bench.gpu_check.case import Figures
from jaxsqueeze.bench.gpu_check.decoding import Session

STEPS = 8
LONGEST = 12  # kernels to name


def of(session: Session, rows: int, out: Path) -> Figures:
    """Writes ``trace.xplane.pb`` (for XProf); microseconds of kernels in a step, in all and by name."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            session.steps(rows, STEPS)
        (file,) = Path(folder).rglob("*.xplane.pb")
        shutil.copy(file, out / "trace.xplane.pb")
    times: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(out / "trace.xplane.pb")).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    times[event.name] += event.duration_ns / 1e3 / STEPS
    return {
        "trace": "trace.xplane.pb",
        "trace_rows": rows,
        "kernel_us": sum(times.values()),
        "kernels": dict(times.most_common(LONGEST)),
    }
