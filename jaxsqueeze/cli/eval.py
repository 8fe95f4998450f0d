"""``jaxsqueeze eval CANDIDATE --reference REF --text FILE``: what a conversion costs in quality, tail included."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jaxsqueeze.checkpoint.source import SourceError
from jaxsqueeze.config import KVDtypes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("candidate", metavar="CANDIDATE", help="converted folder, or any source that convert takes")
    parser.add_argument("--reference", metavar="REF", required=True, help="what it is compared with, likewise")
    parser.add_argument("--text", metavar="FILE", type=Path, required=True, help="UTF-8 text that both models read")
    parser.add_argument("--kv-dtype", default="auto", help="KV of the candidate, as for serve")
    parser.add_argument(
        "--context", default="512,2048", help="ends of the context buckets; the last is a window's length"
    )
    parser.add_argument("--max-tokens", type=int, help="tokens of the text that are scored; default: all")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="writes report.json and report.png; a killed run goes on"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the report; 0, or 2 for models or a text that cannot be compared (one sentence on stderr)."""
    from rich.console import Console

    from jaxsqueeze.checkpoint.ensure import ensure_converted
    from jaxsqueeze.checkpoint.progress import progress_bars
    from jaxsqueeze.report.quality import render
    from jaxsqueeze.report.quality.evaluate import evaluate

    try:
        settings = _settings(args)
        text = args.text.read_text(encoding="utf-8")
        if args.out is not None:
            from jaxsqueeze.bench.plot import require_matplotlib

            require_matplotlib()
            args.out.mkdir(parents=True, exist_ok=True)
        with progress_bars() as report:
            folders = [ensure_converted(source, report=report) for source in (args.candidate, args.reference)]
            found = evaluate(*folders, text, settings, args.out, report)
    except UnicodeDecodeError as error:
        print(f"error: {args.text}: not UTF-8 ({error.reason}); give a text file", file=sys.stderr)
        return 2
    except (ValueError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}; check the path and its rights", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; with the same --out it goes on from here", file=sys.stderr)
        return 130
    Console(width=200).print(render.table(found))
    return 0


def _settings(args: argparse.Namespace):
    from jaxsqueeze.report.quality.evaluate import Settings

    try:
        contexts = tuple(int(part) for part in args.context.split(","))
    except ValueError:
        contexts = ()
    if not contexts or contexts[0] < 2 or list(contexts) != sorted(set(contexts)):
        raise SourceError(f"--context takes rising numbers of tokens, like 512,2048, got {args.context!r}")
    if args.max_tokens is not None and args.max_tokens < 2:
        raise SourceError(f"--max-tokens must be >= 2, got {args.max_tokens}")
    return Settings(contexts, args.max_tokens, KVDtypes.parse(args.kv_dtype))
