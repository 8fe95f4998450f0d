"""Measures a running OpenAI-compatible server: makes the workload's prompts, drives the server, reports.

Imports no accelerator runtime: the client must not take the processor from a server on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
from typing import Any

from rich.console import Console
from rich.progress import Progress

from jaxsqueeze.bench import machine, report
from jaxsqueeze.bench.outcome import Outcome
from jaxsqueeze.bench.plot import plot_runs, require_matplotlib
from jaxsqueeze.bench.workloads import (
    WORDS_PER_TOKEN,
    Corpus,
    Item,
    Workload,
    load_trace,
    synthetic,
    text_words,
)

TOKENIZE_CHARACTERS = 10_000  # text sent to the server's tokenizer at once
CORPUS_CHARACTERS = 300_000  # text tokenised at most: about 75,000 places where a prompt may start


def run(args: argparse.Namespace, command: list[str]) -> int:
    """``--url``: 0 if every request was answered, 1 if some failed. Raises ValueError for bad input."""
    if args.plot:
        require_matplotlib()
    try:
        import jaxsqueeze.bench.client as client
    except ImportError as error:
        raise ValueError('--url needs httpx: pip install "jaxsqueeze[bench]"') from error
    console = report.console()
    api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    model, longest = args.model, args.max_model_len
    if model is None:
        model, listed = asyncio.run(client.discover_model(args.url, api_key))
        longest = longest or listed
    runs = _runs(args, longest)
    target = client.Target(args.url, model, args.endpoint, api_key, args.ignore_eos, args.timeout)
    corpus, form = asyncio.run(_corpus(client, target, args))

    outcomes: dict[str, list[Outcome]] = {}
    summaries: dict[str, dict[str, Any]] = {}
    _first_answer(client, target, corpus.prompt(-1, Item(0.0, input_tokens=8, output_tokens=1)))
    made = itertools.count()  # runs never share a prompt: a prefix cache must not favour the later ones
    for title, workload, open_loop, in_flight in runs:
        calls = [
            client.Call(item.arrival, corpus.prompt(next(made), item), item.output_tokens) for item in workload.items
        ]
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task(title, total=len(calls))
            outcomes[title] = asyncio.run(
                client.drive(
                    target,
                    calls,
                    open_loop=open_loop,
                    max_in_flight=in_flight,
                    max_seconds=args.max_seconds,
                    on_done=lambda _, progress=progress, bar=bar: progress.advance(bar),
                )
            )
        summary = report.summarise(outcomes[title], slo_ttft=args.slo_ttft, slo_itl=args.slo_itl)
        summaries[title] = {"workload": workload.description, "prompts": form, "in_flight": in_flight, **summary}
        report.say(console, f"{workload.description}; prompts as {form}")
        report.print_run(console, f"{model} at {target.root}, {title}", summary)

    about = machine.describe(command)
    report.print_machine(console, about)
    if args.json:
        report.write_json(args.json, {"machine": about, "url": target.root, "model": model, "runs": summaries})
    if args.plot:
        plot_runs(args.plot, outcomes, about)
    return int(any(o.error for run_outcomes in outcomes.values() for o in run_outcomes))


def _runs(args: argparse.Namespace, longest: int | None) -> list[tuple[str, Workload, bool, int]]:
    """(title, workload, open loop, requests in flight at most) of each run."""
    if args.trace_file:
        trace = load_trace(
            args.trace_file,
            length_scale=args.length_scale,
            time_scale=args.time_scale,
            limit=args.limit,
            max_total_tokens=longest,
        )
        return [(args.trace_file.stem, trace, True, args.max_in_flight)]

    def made(rate: float | None) -> Workload:
        return synthetic(args.num_requests, args.input_tokens, args.output_tokens, rate=rate, seed=args.seed)

    if args.rate is not None:
        return [(f"{args.rate:g} requests/s", made(args.rate), True, args.max_in_flight)]
    return [(f"{n} in flight", made(None), False, n) for n in args.concurrency]


async def _corpus(client: Any, target: Any, args: argparse.Namespace) -> tuple[Corpus, str]:
    """The prompts' source and what to call it. Ids need the server's tokenizer and the completions API."""
    words = text_words(args.text, seed=args.seed)
    wants_ids = args.prompt_form == "ids" or (args.prompt_form == "auto" and target.api == "completions")
    if wants_ids and target.api == "chat":
        raise ValueError("--prompt-form ids needs --endpoint completions: a chat takes text")
    if wants_ids:
        text = " ".join(words)[:CORPUS_CHARACTERS]
        step = TOKENIZE_CHARACTERS
        ids = await client.tokenize(target, [text[i : i + step] for i in range(0, len(text), step)])
        if ids is not None:
            return Corpus(ids, seed=args.seed), "token ids"
        if args.prompt_form == "ids":
            raise ValueError(f"{target.root} has no /tokenize to make ids with; use --prompt-form text")
        print(f"{target.root} has no /tokenize: prompts are text, their lengths approximate", file=sys.stderr)
    return Corpus(words, units_per_token=WORDS_PER_TOKEN, seed=args.seed), f"text, {WORDS_PER_TOKEN:g} words a token"


def _first_answer(client: Any, target: Any, prompt: list[int] | str) -> None:
    """One request before the clock starts. Raises ValueError if the server cannot answer it."""
    probe = client.Call(0.0, prompt, 1)
    (outcome,) = asyncio.run(client.drive(target, [probe], open_loop=False, max_in_flight=1))
    if outcome.error:
        cure = "; try --no-ignore-eos" if target.ignore_eos and outcome.error.startswith("HTTP 4") else ""
        raise ValueError(f"{target.root} did not answer a first request: {outcome.error}{cure}")
