"""``jaxsqueeze convert SOURCE [OUT]``: a checkpoint from elsewhere into a folder this engine loads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jaxsqueeze.checkpoint.source import DTYPES, SourceError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="checkpoint folder, .gguf file, hub id org/name[@revision], or 'demo'"
    )
    parser.add_argument("out", metavar="OUT", nargs="?", type=Path, help="folder to write; None: checkpoints/<name>")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="type of the stored weights")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a converted checkpoint")


def run(args: argparse.Namespace) -> int:
    """Converts; 0, or 2 for input that cannot be converted (one sentence on stderr, nothing written)."""
    from jaxsqueeze.checkpoint.convert import convert
    from jaxsqueeze.checkpoint.progress import progress_bars
    from jaxsqueeze.checkpoint.resolve import resolve

    try:
        with progress_bars() as report:
            resolved = resolve(args.source, report)
            out = args.out or Path("checkpoints") / resolved.name
            convert(resolved.open(), out, name=args.source, dtype=args.dtype, force=args.force, report=report)
    except SourceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0
