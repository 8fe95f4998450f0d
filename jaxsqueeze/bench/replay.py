"""Replays a trace through the engine, all requests queued at once: throughput, host share, page-tail waste; with
``--static-batching`` the same requests once more in fixed groups.

Static batching (request-level scheduling in Orca, Yu et al. 2022; what ``generate`` of transformers does): ``slots``
requests start together, their prompts padded to the longest, and the next group starts only when all of them have
ended, so rows that end early stay idle. Continuous batching fills a slot as soon as it is free and pads no prompt. The
third row of the report, "static, unpadded", starts groups in the same way without the padding: what scheduling alone
is worth. Same engine, same compiled steps, same requests; measured in turn, medians over the repeats. Page-tail waste
(unused token places at the ends of sequences / live tokens) is watched in a pass of its own, so that watching costs no
measured time.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxsqueeze.bench import machine, report
from jaxsqueeze.bench.phases import medians
from jaxsqueeze.bench.worker import Worker
from jaxsqueeze.bench.workloads import Corpus, load_trace


def run(args: argparse.Namespace, command: list[str]) -> int:
    """Measures and reports; 0. Raises ValueError for bad input."""
    if not args.trace_file:
        raise ValueError("--static-batching needs a --trace-file to replay")
    model = args.model or "demo"
    with Worker("engine") as engine:
        about = engine.call(
            "open",
            model=model,
            dtype=args.dtype,
            max_slots=args.slots,
            max_model_len=args.max_model_len,
            page_size=args.page_size,
            kv_bytes=args.kv_bytes,
        )
        workload = load_trace(
            args.trace_file,
            length_scale=args.length_scale,
            time_scale=args.time_scale,
            limit=args.limit,
            max_total_tokens=about["max_model_len"],
        )
        corpus = Corpus.random_ids(about["vocab_size"], seed=args.seed)
        requests = [[corpus.prompt(i, item), item.output_tokens] for i, item in enumerate(workload.items)]
        modes: dict[str, dict[str, Any]] = {"continuous": {"group": None, "padded": False}}
        if args.static_batching:
            modes["static"] = {"group": args.slots, "padded": True}
            modes["static, unpadded"] = {"group": args.slots, "padded": False}
        kept: dict[str, list[dict[str, Any]]] = {name: [] for name in modes}
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("watching pages", total=1 + args.repeats * len(modes))
            watched = engine.call("replay", requests=requests, **modes["continuous"], watch=True)
            progress.advance(bar)
            if args.trace:
                engine.call("start_profile", directory=str(args.trace))
            for _ in range(args.repeats):
                for name, mode in modes.items():
                    progress.update(bar, description=name)
                    kept[name].append(engine.call("replay", requests=requests, **mode, watch=False))
                    progress.advance(bar)
            if args.trace:
                engine.call("stop_profile")

    figures = {name: medians(results) for name, results in kept.items()}
    waste = watched["page_tail_waste"]
    speed = {name: row["output_tokens_per_s"] for name, row in figures.items()}
    ratios = {name: speed["continuous"] / speed[name] for name in speed if name != "continuous"}
    console = report.console()
    report.say(console, f"{model}, {workload.description}, all queued at once, {args.slots} slots")
    console.print(_table(figures))
    for name, ratio in ratios.items():
        report.say(console, f"continuous / {name}, throughput: {ratio:.2f}x")
    over = f"mean over {watched['steps']} steps, pages of {args.page_size} tokens"
    report.say(console, f"page-tail waste: {waste:.2%} of live KV, {over}")
    if args.trace:
        report.print_trace(console, args.trace)
    on = machine.describe(command)
    report.print_machine(console, on)
    if args.json:
        contents = {
            "machine": on,
            "model": model,
            "workload": workload.description,
            "slots": args.slots,
            "median": figures,
            "repeats": kept,
            "continuous_over": ratios,
            "page_tail_waste": waste,
        }
        report.write_json(args.json, contents)
    return 0


def _table(figures: dict[str, dict[str, Any]]) -> Table:
    table = Table(
        "batching", "seconds", "output tokens/s", "all tokens/s", "steps", "host, device idle", "host, at all"
    )
    for name, row in figures.items():
        table.add_row(
            name,
            f"{row['seconds']:.2f}",
            f"{row['output_tokens_per_s']:.1f}",
            f"{row['total_tokens_per_s']:.1f}",
            f"{row['steps']:.0f}",
            f"{row['host_exposed_share']:.1%} of step time",
            f"{row['host_busy_share']:.1%} of step time",
        )
    return table
