"""What the parts found, as tables, against what was hoped for, and as JSON. The tables fit on one screen and a half."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxsqueeze.bench import report
from jaxsqueeze.bench.gpu_check.supervisor import Outcome
from jaxsqueeze.bench.gpu_check.targets import Target

Results = Mapping[str, Outcome]  # by part


def done(outcome: Outcome | None) -> list[dict[str, Any]]:
    """Figures of the cases that ran to their end."""
    return [r for r in (outcome.results.values() if outcome else ()) if r["state"] == "done"]


def ceilings(results: Results) -> dict[str, float]:
    """GB/s of a copy and of a read, TFLOP/s of a matmul, as far as they were measured."""
    unit = {"matmul": "tflop_per_s"}
    return {r["ceiling"]: r[unit.get(r["ceiling"], "gb_per_s")] for r in done(results.get("speed")) if "ceiling" in r}


def as_json(results: Results, targets: Iterable[Target], machine: dict[str, Any]) -> dict[str, Any]:
    return {
        "machine": machine,
        "ceilings": ceilings(results),
        "targets": [{"name": t.name, "goal": t.goal, "reached": t.reached, "state": t.state} for t in targets],
        "parts": {
            name: {"device": o.device, "seconds": o.seconds, "note": o.note, "cases": o.results}
            for name, o in results.items()
        },
    }


def print_all(console: Console, results: Results, targets: Iterable[Target]) -> None:
    """What did not work first: of long output the end is read."""
    _problems(console, results)
    if "correctness" in results:
        _correctness(console, results["correctness"])
    top = ceilings(results)
    if "speed" in results:
        _speed(console, done(results["speed"]), top)
    models = [(name, r) for name in ("models", "captured") for r in done(results.get(name)) if "by_rows" in r]
    if models:
        _models(console, models, top)
    for _, r in models:
        if r.get("kernels"):
            _kernels(console, r)
    if top:
        units = {"matmul": "TFLOP/s"}
        report.say(console, "measured: " + ", ".join(f"{k} {v:.0f} {units.get(k, 'GB/s')}" for k, v in top.items()))
    table = _table("target", "goal", "reached", "")
    for t in targets:
        table.add_row(t.name, t.goal_text, t.reached_text, t.state)
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=not i)
    return table


def _problems(console: Console, results: Results) -> None:
    for name, outcome in results.items():
        if outcome.note:
            report.say(console, f"{name}: {outcome.note}")
        skipped = [case for case, r in outcome.results.items() if r["state"] == "skipped"]
        if skipped:
            report.say(console, f"{name}: {len(skipped)} cases skipped, the first was {skipped[0]}")
        for case, r in outcome.results.items():
            if r["state"] == "failed":
                report.say(console, f"{name}: {case}: FAILED: {r['reason']}")


def _correctness(console: Console, outcome: Outcome) -> None:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for case, r in outcome.results.items():
        kinds.setdefault(case.partition(":")[0], []).append(r)
    table = _table("correctness", "right", "failed", "not covered", "skipped", "largest error")
    for kind, found in kinds.items():
        count = [sum(r["state"] == s for r in found) for s in ("done", "failed", "not covered", "skipped")]
        errors = [r["error"] for r in found if r["state"] == "done"]
        table.add_row(kind, *map(str, count), f"{max(errors):.1e}" if errors else "-")
    console.print(table)


def _speed(console: Console, found: list[dict[str, Any]], top: Mapping[str, float]) -> None:
    """A row for each problem: the implementation that serves, XLA, and any other."""
    by_label: dict[str, dict[str, dict[str, Any]]] = {}
    for r in found:
        if "label" in r:
            by_label.setdefault(r["label"], {})[r["implementation"]] = r
    table = _table("op", "by", "us", "+-", "rate", "of ceiling", "XLA us", "gain", "others")
    for label, by_name in by_label.items():
        serves = next((r for r in by_name.values() if r["chosen"]), next(iter(by_name.values())))
        xla = by_name.get("reference")
        others = [f"{name} {r['us']:.1f}" for name, r in by_name.items() if r is not serves and r is not xla]
        share = share_of(serves, top)
        rate = f"{serves['gb_per_s']:.0f} GB/s" if serves["bound"] == "bytes" else f"{serves['tflop_per_s']:.1f} TF/s"
        table.add_row(
            label,
            serves["implementation"],
            f"{serves['us']:.1f}",
            f"{serves['spread']:.0%}",
            rate,
            "-" if share is None else f"{share:.0%}",
            f"{xla['us']:.1f}" if xla else "-",
            f"{xla['us'] / serves['us']:.2f}" if xla else "-",
            ", ".join(others),
        )
    console.print(table)


def share_of(figures: Mapping[str, Any], top: Mapping[str, float]) -> float | None:
    """Of the ceiling that bounds the op: the copy's bandwidth or the matmul's rate."""
    name, key = ("copy", "gb_per_s") if figures["bound"] == "bytes" else ("matmul", "tflop_per_s")
    return figures[key] / top[name] if top.get(name) else None


def _models(console: Console, models: list[tuple[str, dict[str, Any]]], top: Mapping[str, float]) -> None:
    table = _table(
        "decode", "rows", "tokens/s", "step us", "+-", "GB/s", "of copy", "host gap", "single", "prefill tok/s"
    )
    for part, r in models:
        for at in r["by_rows"]:
            table.add_row(
                f"{r['model']} {r['weights']}" + (" +WHILE" if part == "captured" else ""),
                str(at["rows"]),
                f"{at['tokens_per_s']:.0f}",
                f"{at['step_us']:.0f}",
                f"{at['spread']:.0%}",
                f"{at['gb_per_s']:.0f}",
                f"{at['gb_per_s'] / top['copy']:.0%}" if top.get("copy") else "-",
                f"{at['host_gap']:.1%}",
                f"{at['host_gap_single']:.1%}",
                f"{r['prefill_tokens_per_s']:.0f}" if at is r["by_rows"][0] else "",
            )
    console.print(table)


def _kernels(console: Console, r: dict[str, Any]) -> None:
    report.say(console, f"{r['model']} {r['weights']}, {r['trace_rows']} rows: {r['kernel_us']:.0f} us in kernels")
    for name, us in r["kernels"].items():
        report.say(console, f"  {us:8.1f}  {name[:90]}")
