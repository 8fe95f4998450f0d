"""``scripts/tune.py``: measures what a model will ask of the kernels, and writes the device's table.

Every entry is written as soon as it is known. A second run, for another model or more slots, adds to the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import get_args

import jax
from rich.console import Console
from rich.table import Table

from jaxsqueeze.bench import report, tune
from jaxsqueeze.bench.model_problems import Found, problems
from jaxsqueeze.bench.random_model import SHAPES
from jaxsqueeze.config import EngineConfig
from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.runner.buckets import decode_sizes, make_buckets
from pallas_kernels import tuning
from pallas_kernels.quant_matmul.problem import Format
from pallas_kernels.target import Target

# What decides the problems.
FLAGS = ("kv_dtype", "max_slots", "max_model_len", "page_size", "max_step_tokens", "decode_steps")
LONGEST = 4096  # context where none is given, as the engine has it
FORMATS = tuple(f for f in get_args(Format) if f != "bf16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = ", ".join(SHAPES)
    parser.add_argument(
        "--model", required=True, help=f"a shape ({shapes}), converted folder, or any source of convert"
    )
    parser.add_argument("--weights", action="append", choices=FORMATS, help="may be given again; default: int8, int4")
    parser.add_argument("--out", type=Path, default=tuning.FOLDER, help="folder of the tables")
    parser.add_argument("--minutes", type=float, help="no entry is begun after these; what was measured is kept")
    about = parser.add_argument_group("as for serve", "tiles are found by the shapes and formats that these lead to")
    for field in dataclasses.fields(EngineConfig):
        if field.name in FLAGS:
            flag = "--" + field.name.replace("_", "-")
            text = field.metadata["help"] + (f" ({field.default})" if field.default is not None else "")
            kind = str if field.name == "kv_dtype" else int
            about.add_argument(flag, type=kind, default=field.default, help=text)


def run(args: argparse.Namespace) -> int:
    """0; 1 if a candidate was wrong; 2 for bad input or without a GPU, with a sentence on stderr."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(
            f"tune measures GPU kernels, and jax finds a {device.platform.upper()} only: run it where nvidia-smi lists "
            "a GPU and jax[cuda13] is installed",
            file=sys.stderr,
        )
        return 2
    try:
        cfg = model_config(args.model)
        config = EngineConfig(**{name: getattr(args, name) for name in FLAGS})
        tune.check_table(args.out / tuning.path(device.device_kind).name)
    except ValueError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    max_model_len = args.max_model_len or min(cfg.max_position, LONGEST)
    buckets = make_buckets(config, decode_sizes(config.max_slots, "cuda", "bfloat16"))
    found = [
        p
        for weights in (None, *(args.weights or ("int8", "int4")))
        for p in problems(cfg, config, buckets, max_model_len, weights, "bfloat16")
    ]
    found.sort(key=_tokens)  # few rows first: the most frequent steps, should time run out
    deadline = time.monotonic() + 60 * args.minutes if args.minutes is not None else None
    return measure(dict.fromkeys(found), Target.of(device), args.out, report.console(), deadline)


def _tokens(found: Found) -> int:
    _, problem = found
    sizes = {"N": 1, "Q": 1, "T": 1, "B": 1} | dataclasses.asdict(problem)
    return sizes["N"] * sizes["Q"] * sizes["T"] * sizes["B"]


def model_config(model: str) -> ModelConfig:
    """Raises ValueError for what is no model."""
    if model in SHAPES:
        return SHAPES[model]
    # Reading checkpoints needs packages that tuning for a known shape does not.
    from jaxsqueeze.checkpoint.manifest import is_converted, read_manifest
    from jaxsqueeze.checkpoint.resolve import resolve
    from jaxsqueeze.models.families import config_from_hf

    folder = Path(model).expanduser()
    return read_manifest(folder).config if is_converted(folder) else config_from_hf(resolve(model).open().hf_config)


def measure(found: dict[Found, None], target: Target, folder: Path, console: Console, deadline: float | None) -> int:
    """Tunes, writes and prints every entry. ``deadline``: by ``time.monotonic``."""
    file = folder / tuning.path(target.kind).name
    groups = tune.groups(found)
    table = Table("op", "problem", "winner", "us", "+-", "XLA us", "gain")
    wrong, slower, failed, left = [], [], [], 0
    for (op, key), group in groups.items():
        if deadline is not None and time.monotonic() > deadline:
            left += 1
            continue
        try:
            tuned = tune.tune(op, group, target)
        except Exception as error:  # the device runtime may raise anything; the other entries may still be had
            failed.append(f"{op} {key}: not tuned: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
            continue
        if tuned is None:
            continue
        tune.save(tuned, file)
        winner, us, xla = tuned.winner, tune.microseconds(tuned.winner), tune.microseconds(tuned.xla)
        spread = max(t.spread for t in winner.times)
        row = op, key, str(winner.candidate), f"{us:.1f}", f"{spread:.0%}", f"{xla:.1f}", f"{xla / us:.2f}"
        report.say(console, "  ".join(row))
        table.add_row(*row)
        wrong += [f"{op} {key}: {r.candidate}: {r.wrong}" for r in tuned.results if r.wrong]
        if winner.candidate == tune.XLA:
            slower.append(f"{op} {key}")
    console.print(table)
    for title, lines in (("XLA stays for", slower), ("wrong, never chosen:", wrong), ("failed:", failed)):
        if lines:
            report.say(console, "\n  ".join((title, *lines)))
    if left:
        report.say(console, f"out of time: {left} of {len(groups)} entries were not measured")
    report.say(console, f"written to {file}")
    return int(bool(wrong or failed))
