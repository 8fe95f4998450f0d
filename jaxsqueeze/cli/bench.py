"""``jaxsqueeze bench``: the flags, and which measurement they ask for. The work is in ``jaxsqueeze.bench``."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any, get_args

from jaxsqueeze.bench.workloads import Lengths
from jaxsqueeze.config import DType, EngineConfig


def lengths(text: str) -> Lengths:
    """A ``Lengths`` for argparse, keeping its own message."""
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def counts(text: str) -> tuple[int, ...]:
    """``1,8,32``."""
    try:
        values = tuple(int(x) for x in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of counts like 1,8,32") from error
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"counts must be at least 1, got {text!r}")
    return values


def positive(text: str) -> int:
    """An integer >= 1."""
    (value,) = counts(text)
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags; ``args.flags`` keeps them, so that the report can write the command down."""
    flags: list[argparse.Action] = []
    parser.set_defaults(flags=flags)

    def group(title: str, about: str) -> Any:
        into = parser.add_argument_group(title, about)
        return lambda *names, **kw: flags.append(into.add_argument(*names, **kw))

    add = group("what to measure", "without --url: the engine in this machine; with it: a running server")
    add("--model", help="converted folder or any source (offline: default demo); with --url: the name to ask for")
    add("--url", help="an OpenAI-compatible server, such as http://127.0.0.1:8000")
    add("--static-batching", action="store_true", help="continuous against static batching of a --trace-file")
    add("--startup", action="store_true", help="time from process start to a ready server, cold and warm caches")

    add = group("workload", "a trace, or synthetic requests")
    add("--trace-file", type=Path, help="Azure LLM trace (.csv) or Mooncake trace (.jsonl)")
    add("--length-scale", type=float, default=1.0, help="multiplies the trace's token counts")
    add("--time-scale", type=float, default=1.0, help="multiplies the trace's gaps between arrivals")
    add("--limit", type=positive, help="requests taken from the trace")
    add("--concurrency", type=counts, default="1,8,32", help="requests at once, one run for each; not with --rate")
    add("--rate", type=float, help="requests per second, Poisson arrivals (--url)")
    add("--num-requests", type=positive, default=64, help="synthetic requests of each run (--url)")
    size = "tokens: N, and with --url also uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"
    add("--input-tokens", "--prompt-tokens", type=lengths, default="64", help=f"prompt {size}")
    add("--output-tokens", type=lengths, default="64", help=f"output {size}")
    add("--max-model-len", type=positive, help="longest prompt plus output; longer requests of a trace are left out")
    add("--text", type=Path, help="file to cut prompts from (--url); default: built-in filler")
    add("--seed", type=int, default=0, help="seeds prompts and arrivals")

    add = group("offline", "measuring the engine itself")
    add("--dtype", default=EngineConfig.dtype, choices=get_args(DType), help="arithmetic and KV type")
    add("--peer", choices=("transformers",), help="measure it too, on the same weights, in turn with the engine")
    add("--against", metavar="MODEL", action="append", default=[], help="another model, in turn with --model")
    add("--peer-model", help="where the peer reads the weights; default: what --model was converted from")
    add("--repeats", type=positive, default=3, help="measurements of each figure; the median is reported")
    add("--slots", type=positive, default=8, help="rows decoded at once (--trace-file)")
    add("--page-size", type=positive, default=EngineConfig.page_size, help="tokens in one KV page")
    add("--kv-bytes", type=positive, help="bytes for the KV pool; default: the engine's")
    add("--trace", type=Path, metavar="DIR", help="write a profiler trace of the run, for XProf or Perfetto")

    add = group("server", "with --url")
    add("--endpoint", default="completions", choices=("completions", "chat"), help="which API to call")
    add("--prompt-form", default="auto", choices=("auto", "ids", "text"), help="auto: ids if the server can tokenize")
    add("--api-key", help="default: the environment's OPENAI_API_KEY")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="ask for outputs of full length")
    add("--max-in-flight", type=positive, default=256, help="requests at once at most, with --rate or --trace-file")
    add("--timeout", type=float, default=600.0, help="seconds one request may take, or one start (--startup)")
    add("--max-seconds", type=float, default=3600.0, help="seconds one run may take; later requests count as failed")
    add("--slo-ttft", type=float, metavar="MS", help="goodput: time to the first token at most")
    add("--slo-itl", type=float, metavar="MS", help="goodput: a request's mean time per further token at most")

    add = group("report", "besides the table")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--plot", type=Path, metavar="FILE", help="write a PNG plot (--url)")


def command_flags(args: argparse.Namespace) -> list[str]:
    """The flags that differ from their defaults: the shortest command that repeats this run."""
    words: list[str] = []
    for action in args.flags:
        value = getattr(args, action.dest)
        if isinstance(value, list):  # given once for each
            words += [word for one in value for word in (action.option_strings[0], one)]
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if text == str(action.default):
            continue
        if isinstance(value, bool):
            words.append(action.option_strings[0 if value else -1])
        else:
            words += [action.option_strings[0], text]
    return words


def run(args: argparse.Namespace) -> int:
    """Measures; 2 for bad input, with one sentence on stderr."""
    # A stop request must run the ``finally`` blocks that end the measured processes.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _measure(args)
    except ValueError as error:
        print(f"jaxsqueeze bench: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure(args: argparse.Namespace) -> int:
    command = command_flags(args)
    if sum((bool(args.url), args.static_batching, args.startup)) > 1:
        raise ValueError("--url, --static-batching and --startup are different measurements: give one of them")
    for flag, value, needs, allowed in (
        ("--plot", args.plot, "--url", args.url),
        ("--rate", args.rate, "--url", args.url),
        ("--peer", args.peer, "fixed batches", not (args.url or args.startup or args.trace_file)),
        ("--against", args.against, "fixed batches", not (args.url or args.startup or args.trace_file)),
        (
            "--trace",
            args.trace,
            "an engine of this process (a server has /start_profile)",
            not (args.url or args.startup),
        ),
    ):
        if value and not allowed:
            raise ValueError(f"{flag} goes with {needs}")
    # Each mode imports only what it needs: driving a server must not start an accelerator runtime.
    if args.url:
        from jaxsqueeze.bench import online

        return online.run(args, command)
    if args.startup:
        from jaxsqueeze.bench import startup

        return startup.run(args, command)
    if args.static_batching or args.trace_file:
        from jaxsqueeze.bench import replay

        return replay.run(args, command)
    from jaxsqueeze.bench import offline

    return offline.run(args, command)
