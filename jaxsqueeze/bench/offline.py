"""The whole engine without a server: prefill and decode speed at fixed batch sizes, beside a peer in the same run.

The engine and the peer are measured in turn, batch by batch (A B A B), each in a process of its own, on the same
random prompts of equal length, every output at full length. Medians over the repeats are reported; a first pass of
each is thrown away.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxsqueeze.bench import machine, report
from jaxsqueeze.bench.phases import medians
from jaxsqueeze.bench.worker import Worker
from jaxsqueeze.bench.workloads import Corpus, Item, Lengths

RATES = (
    ("prefill", "prefill_tokens_per_s"),
    ("decode", "decode_tokens_per_s"),
    ("output, whole run", "output_tokens_per_s"),
)

HOST_SHARES = (("host works, device idle", "host_exposed_share"), ("host works at all", "host_busy_share"))


def run(args: argparse.Namespace, command: list[str]) -> int:
    """Measures and reports; 0. Raises ValueError for bad input."""
    prompt_tokens, output_tokens = fixed(args.input_tokens), fixed(args.output_tokens)
    model = args.model or "demo"
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Worker("engine"))
        workers = {"engine": engine}
        settings = {
            "dtype": args.dtype,
            "max_slots": max(args.concurrency),
            "max_model_len": args.max_model_len,
            "page_size": args.page_size,
            "kv_bytes": args.kv_bytes,
        }
        about = {"engine": engine.call("open", model=model, **settings)}
        for other in args.against:
            workers[other] = stack.enter_context(Worker("engine"))
            about[other] = workers[other].call("open", model=other, **settings)
        if args.peer:
            peer = workers[args.peer] = stack.enter_context(Worker(args.peer))
            source = args.peer_model or engine.call("peer_source", model=model)
            about[args.peer] = peer.call("open", source=source, dtype=about["engine"]["dtype"])
        if args.trace:
            engine.call("start_profile", directory=str(args.trace))
        corpus = Corpus.random_ids(min(x["vocab_size"] for x in about.values()), seed=args.seed)
        figures = _in_turn(workers, corpus, args.concurrency, args.repeats, prompt_tokens, output_tokens)
        if args.trace:
            engine.call("stop_profile")

    console = report.console()
    report.say(console, f"{model}, prompts of {prompt_tokens} tokens, outputs of {output_tokens}")
    for name, facts in about.items():
        report.say(console, f"{name}: {facts['name']}, {facts['dtype']}, {facts['threads']} threads")
    console.print(comparison(figures))
    if args.trace:
        report.print_trace(console, args.trace)
    on = machine.describe(command)
    report.print_machine(console, on)
    if args.json:
        report.write_json(args.json, {"machine": on, "model": model, "programs": about, "figures": figures})
    return 0


def fixed(lengths: Lengths) -> int:
    """Equal lengths only: a batch's speed must not depend on which rows end first."""
    if lengths.kind != "fixed":
        raise ValueError(f"offline batches have one length, got {lengths}: give a number")
    return int(lengths.first)


def _in_turn(
    workers: dict[str, Worker],
    corpus: Corpus,
    concurrency: tuple[int, ...],
    repeats: int,
    prompt_tokens: int,
    output_tokens: int,
) -> list[dict[str, Any]]:
    """One entry for each batch size: the medians of every program, and the repeats they come from."""
    figures = []
    drawn = 0
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("measuring", total=len(concurrency) * (repeats + 1) * len(workers))
        for rows in concurrency:
            kept: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
            for repeat in range(repeats + 1):
                # New prompts each time: a prefix cache must not answer for the model.
                prompts = [corpus.prompt(drawn + i, Item(0.0, prompt_tokens, output_tokens)) for i in range(rows)]
                drawn += rows
                for name, worker in workers.items():
                    progress.update(bar, description=f"{rows} rows: {name}")
                    result = worker.call("batch", prompts=prompts, output_tokens=output_tokens)
                    if repeat:
                        kept[name].append(result)
                    progress.advance(bar)
            figures.append({"rows": rows, "median": {n: medians(r) for n, r in kept.items()}, "repeats": kept})
    return figures


def comparison(figures: list[dict[str, Any]]) -> Table:
    """Tokens per second of every program at every batch size, how they spread, and the engine over its peer."""
    names = list(figures[0]["median"])
    table = Table("rows", "tokens/s of", *names)
    peers = [name for name in names if name != "engine"]
    for peer in peers:
        table.add_column(f"engine / {peer}", justify="right")
    for entry in figures:
        for label, key in RATES:
            medians_of = {name: entry["median"][name][key] for name in names}
            cells = [_spread([r[key] for r in entry["repeats"][name]], medians_of[name]) for name in names]
            ratios = [
                f"{medians_of['engine'] / medians_of[peer]:.2f}x" if medians_of["engine"] and medians_of[peer] else "-"
                for peer in peers
            ]
            table.add_row(str(entry["rows"]) if label == RATES[0][0] else "", label, *cells, *ratios)
        for label, key in HOST_SHARES:
            table.add_row("", label, f"{entry['median']['engine'][key]:.1%} of step time")
        table.add_section()
    return table


def _spread(values: list[float | None], median: float | None) -> str:
    numbers = np.array([v for v in values if v is not None])
    return "-" if median is None else f"{median:.1f} ({numbers.min():.1f}..{numbers.max():.1f})"
