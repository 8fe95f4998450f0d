"""``jaxsqueeze convert SOURCE [OUT]``: a checkpoint from elsewhere into a folder this engine loads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxsqueeze.checkpoint.calibration.text import DEFAULT_TOKENS, Calibration
from jaxsqueeze.checkpoint.manifest import Manifest, read_manifest
from jaxsqueeze.checkpoint.source import DTYPES, SourceError
from jaxsqueeze.cli import gate
from jaxsqueeze.quant.scheme import DEFAULT_GROUP, GROUPS, STORED, WEIGHTS, Recipe, Scheme

if TYPE_CHECKING:
    from jaxsqueeze.checkpoint.convert import Judge


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="checkpoint folder, .gguf file, hub id org/name[@revision], or 'demo'"
    )
    parser.add_argument("out", metavar="OUT", nargs="?", type=Path, help="folder to write; default: checkpoints/<name>")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="type of the stored weights")
    quantised = parser.add_argument_group("quantised weights")
    quantised.add_argument(
        "--weights",
        choices=WEIGHTS,
        default=STORED,
        help="format of the layers' matmul weights; stored: quantised ones as the source has them",
    )
    quantised.add_argument(
        "--group-size", type=int, choices=GROUPS, default=DEFAULT_GROUP, help="int4, int2: inputs that share a scale"
    )
    quantised.add_argument(
        "--zero-points", action="store_true", help="int4, int2: each group has a zero point of its own"
    )
    quantised.add_argument(
        "--rotate",
        action="store_true",
        help="int8: rotate the inputs, so that a CPU can take them in int8 (W8A8)",
    )
    pattern = {"metavar": "PATTERN", "action": "append", "default": []}
    quantised.add_argument(
        "--keep",
        help="weights left as they are, like 'layers_0/*' or '*/mlp/down/weight'; repeat for several",
        **pattern,
    )
    quantised.add_argument(
        "--also", help="quantise these too: 'embed/weight', 'lm_head/weight'; repeat for several", **pattern
    )
    quantised.add_argument(
        "--calibration",
        metavar="FILE",
        type=Path,
        help="UTF-8 text: the layers' weights are rounded for what it gives them (AWQ, GPTQ), those of --also to the "
        "nearest; a killed run goes on",
    )
    quantised.add_argument(
        "--calibration-tokens", type=int, default=DEFAULT_TOKENS, help="tokens of the text that are read"
    )
    gate.add_arguments(parser)
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a converted checkpoint")


def _on_cpu() -> Callable[..., Manifest]:
    """``convert``, imported after the source was found: bad input is answered without starting jax."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # converting needs no accelerator, and must not take its memory
    from jaxsqueeze.checkpoint.convert import convert

    return convert


def _recipe(args: argparse.Namespace) -> Recipe:
    if args.weights == "int2" and args.calibration is None:
        raise SourceError("int2 weights must be calibrated; pass --calibration FILE with a text, or choose int4")
    if args.weights in (STORED, "bf16") and args.calibration is not None:
        raise SourceError("--calibration is for weights that are quantised here; choose them with --weights, like int4")
    try:
        patterns = tuple(args.keep), tuple(args.also)
        return Recipe(args.weights, args.group_size, args.zero_points, *patterns, args.rotate)
    except ValueError as error:
        raise SourceError(str(error)) from error


def run(args: argparse.Namespace) -> int:
    """Converts; 0, or 2 for input that cannot be converted, or gate.REFUSED for a result past a limit (one sentence on
    stderr, nothing written)."""
    from jaxsqueeze.checkpoint.progress import progress_bars
    from jaxsqueeze.checkpoint.resolve import resolve

    try:
        with progress_bars() as report:
            resolved = resolve(args.source, report)
            out = args.out or Path("checkpoints") / resolved.name
            source = resolved.open()
            convert = _on_cpu()
            from jaxsqueeze.checkpoint.assemble import prepare
            from jaxsqueeze.checkpoint.convert import chosen

            recipe, limits = _recipe(args), gate.limits(args)
            calibration = None if args.calibration is None else Calibration(args.calibration, args.calibration_tokens)
            settings = {"dtype": args.dtype, "recipe": recipe, "calibration": calibration, "force": args.force}

            def make(raised: Mapping[str, Scheme], judge: Judge | None) -> Manifest:
                return convert(source, out, name=args.source, raised=raised, judge=judge, report=report, **settings)

            if args.text is None:
                make({}, None)
            elif code := gate.judged(args, limits, chosen(prepare(source), recipe), out, make, report):
                return code
            manifest = read_manifest(out)
    except (SourceError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: {error.filename or args.source}: {error.strerror}; check the path and its rights", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        goes_on = "; started again it goes on from here" if args.calibration is not None else ""
        print(f"interrupted, nothing written{goes_on}", file=sys.stderr)
        return 130
    for note in manifest.notes:
        print(f"note: {note}", file=sys.stderr)
    if "tokenizer.json" not in manifest.files:
        print(f"note: {args.source} has no tokenizer.json, so the result cannot serve text", file=sys.stderr)
    print(out)
    return 0
