"""From outcomes to figures: percentiles, throughput, goodput; the table, the JSON file.

Definitions. TTFT: from a request's begin to its first chunk with text. ITL: gaps between consecutive chunks with
text, all requests pooled (a chunk may carry several tokens). TPOT: (last chunk - first chunk) / (output tokens - 1) of
one request. E2E: from begin to the last byte. Throughput: tokens of complete requests over the run's whole duration.
Goodput: complete requests per second that met every limit given: TTFT <= ``slo_ttft`` and TPOT <= ``slo_itl``. Only
complete requests count in latencies; the others are counted by what went wrong.
Units: milliseconds for latencies, seconds for durations, tokens and requests per second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxsqueeze.bench.outcome import Outcome

PERCENTILES = (50, 95, 99)


def console() -> Console:
    """Standard output; wide enough for every table where it is a file or a pipe."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=120)


def say(console: Console, line: str, style: str | None = None) -> None:
    """One line as it is: no markup read into it, not wrapped."""
    console.print(line, markup=False, soft_wrap=True, style=style)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and linear-interpolation percentiles; None where there is nothing to measure."""
    if not len(values):
        return {"mean": None, **{f"p{p}": None for p in PERCENTILES}}
    points = np.percentile(values, PERCENTILES)
    return {"mean": float(np.mean(values)), **{f"p{p}": float(x) for p, x in zip(PERCENTILES, points, strict=True)}}


def ttft(outcome: Outcome) -> float:
    """Seconds; the outcome must have a chunk."""
    return outcome.chunk_times[0] - outcome.begin


def tpot(outcome: Outcome) -> float | None:
    """Seconds per output token after the first; None for an output of one token or one chunk."""
    if outcome.output_tokens < 2 or len(outcome.chunk_times) < 2:
        return None
    return (outcome.chunk_times[-1] - outcome.chunk_times[0]) / (outcome.output_tokens - 1)


def meets(outcome: Outcome, slo_ttft: float | None, slo_itl: float | None) -> bool:
    """Whether one complete request met the limits (milliseconds)."""
    per_token = tpot(outcome)
    return (slo_ttft is None or ttft(outcome) * 1e3 <= slo_ttft) and (
        slo_itl is None or per_token is None or per_token * 1e3 <= slo_itl
    )


def summarise(
    outcomes: Sequence[Outcome], *, slo_ttft: float | None = None, slo_itl: float | None = None
) -> dict[str, Any]:
    """All figures of one run."""
    done = [o for o in outcomes if o.error is None and o.chunk_times]
    errors = grouped([o.error or "no text in the answer" for o in outcomes if o.error or not o.chunk_times])
    duration = max((o.end for o in outcomes), default=0.0) - min((o.begin for o in outcomes), default=0.0)
    good = sum(meets(o, slo_ttft, slo_itl) for o in done)
    per_s = 1 / duration if duration > 0 else 0.0
    prompt, output = sum(o.prompt_tokens for o in done), sum(o.output_tokens for o in done)
    gaps = [float(gap) for o in done for gap in np.diff(o.chunk_times)]
    return {
        "requests": len(outcomes),
        "complete": len(done),
        "errors": errors,
        "without_usage": sum(not o.has_usage for o in done),
        "duration_s": duration,
        "prompt_tokens": prompt,
        "cached_tokens": sum(o.cached_tokens for o in done),
        "output_tokens": output,
        "requests_per_s": len(done) * per_s,
        "prompt_tokens_per_s": prompt * per_s,
        "output_tokens_per_s": output * per_s,
        "slo_ttft_ms": slo_ttft,
        "slo_itl_ms": slo_itl,
        "good": good,
        "goodput_requests_per_s": good * per_s,
        "ttft_ms": percentiles([ttft(o) * 1e3 for o in done]),
        "itl_ms": percentiles([gap * 1e3 for gap in gaps]),
        "tpot_ms": percentiles([t * 1e3 for o in done if (t := tpot(o)) is not None]),
        "e2e_ms": percentiles([(o.end - o.begin) * 1e3 for o in done]),
        "send_delay_ms": percentiles([(o.sent - o.begin) * 1e3 for o in outcomes]),
    }


def grouped(errors: Sequence[str]) -> dict[str, int]:
    """Counts of errors that differ in numbers only, under the first message of each kind."""
    kinds: dict[str, list[str]] = {}
    for error in errors:
        kinds.setdefault(re.sub(r"\d+", "#", error.partition(":")[2]) + error.partition(":")[0], []).append(error)
    return {messages[0]: len(messages) for messages in kinds.values()}


def print_run(console: Console, title: str, summary: dict[str, Any]) -> None:
    """Latencies of one run as a table, with the counts and rates below."""
    limits = [
        f"{name} <= {summary[key]:g} ms"
        for name, key in (("TTFT", "slo_ttft_ms"), ("ITL", "slo_itl_ms"))
        if summary[key] is not None
    ]
    lines = [
        f"{summary['complete']} of {summary['requests']} requests complete in {summary['duration_s']:.2f} s, "
        f"{summary['prompt_tokens']} prompt tokens ({summary['cached_tokens']} cached), "
        f"{summary['output_tokens']} output tokens",
        f"throughput {summary['requests_per_s']:.2f} requests/s, {summary['output_tokens_per_s']:.1f} output tokens/s, "
        f"{summary['prompt_tokens_per_s']:.1f} prompt tokens/s",
    ]
    if limits:
        share = f"{summary['good']} of {summary['requests']} requests met {' and '.join(limits)}"
        lines.append(f"goodput {summary['goodput_requests_per_s']:.2f} requests/s: {share}")
    if summary["without_usage"]:
        lines.append(f"{summary['without_usage']} answers had no usage: their chunks were counted as tokens")
    lines += [f"{count} failed: {error}" for error, count in summary["errors"].items()]
    say(console, title, style="bold")
    table = Table()
    for name in ("ms", "mean", *(f"p{p}" for p in PERCENTILES)):
        table.add_column(name, justify="left" if name == "ms" else "right")
    for name, key in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("TPOT", "tpot_ms"), ("E2E", "e2e_ms")):
        table.add_row(name, *("-" if x is None else f"{x:.1f}" for x in summary[key].values()))
    if (summary["send_delay_ms"]["p99"] or 0) > 1:
        table.add_row("sent late", *(f"{x:.1f}" for x in summary["send_delay_ms"].values()))
    console.print(table)
    for line in lines:
        say(console, line)


def print_trace(console: Console, folder: Path) -> None:
    """Where the profiler trace of the run is."""
    say(console, f"profiler trace in {folder}: open it with xprof or ui.perfetto.dev")


def print_machine(console: Console, machine: dict[str, Any]) -> None:
    """The last lines of every report: what it ran on and how to repeat it."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    say(
        console,
        f"{machine['date']}  {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Python {machine['python']}, {versions}",
    )
    say(console, f"repeat with: {machine['command']}")


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Plain JSON: a NaN would be a bug in the figures, so it is refused."""
    try:
        path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
