"""The picture of one or several runs against a server: where the latencies lie, and when they happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxsqueeze.bench.outcome import Outcome
from jaxsqueeze.bench.report import ttft


def require_matplotlib() -> None:
    """Raises ValueError with the cure, before anything is measured."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError('plots need matplotlib: pip install "jaxsqueeze[bench]"') from error
    matplotlib.use("Agg")


def plot_runs(path: Path, runs: Mapping[str, Sequence[Outcome]], machine: dict[str, Any]) -> None:
    """Writes a PNG: cumulative distributions of TTFT, ITL and E2E (ms, logarithmic), and TTFT over the run's time."""
    require_matplotlib()
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    panels = list(zip(("TTFT", "ITL", "E2E"), axes.flat[:3], strict=True))
    for label, outcomes in runs.items():
        done = [o for o in outcomes if o.error is None and o.chunk_times]
        values = {
            "TTFT": [ttft(o) for o in done],
            "ITL": [gap for o in done for gap in np.diff(o.chunk_times)],
            "E2E": [o.end - o.begin for o in done],
        }
        for name, axis in panels:
            if values[name]:
                axis.ecdf(np.maximum(np.asarray(values[name]) * 1e3, 1e-3), label=label)
        axes[1, 1].plot([o.begin for o in done], [ttft(o) * 1e3 for o in done], ".", markersize=3, label=label)
    for name, axis in panels:
        axis.set(
            title=name, xlabel="ms", ylabel="share of requests" if name != "ITL" else "share of gaps", xscale="log"
        )
    axes[1, 1].set(title="TTFT over the run", xlabel="s", ylabel="ms")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize="small")
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}\n{machine['command']}", fontsize=8)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        pyplot.close(figure)
