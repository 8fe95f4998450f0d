"""Chooses an implementation for a problem on a target, falls back where it must, and can say why.

An op is a package: ``problem.py`` holds its static facts (``Problem``, a frozen dataclass with ``key``, its name in the
tuned tables, and ``inputs()``, abstract arrays of its kind), ``reference.py`` is plain JAX and covers every case,

    run(problem, *arrays)

and each other implementation is a module with

    tiles(problem, target) -> candidate tiles, the default first; NotImplementedError, with the reason, if it has none
    run(problem, tile, launcher, *arrays)
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pallas_kernels import launch, tuning
from pallas_kernels.target import Target
from pallas_kernels.tuning import Tile

log = logging.getLogger(__name__)

REFERENCE = "reference"
# Best first. Mosaic GPU comes after Triton until a device's tuned table names it: nobody has measured it faster.
IMPLEMENTATIONS = {
    "cpu": {"linear": ("lanes",), "moe_matmul": ("integers",), "quant_matmul": ("integers",)},
    "cuda": {
        "kv_write": ("triton",),
        "moe_matmul": ("triton",),
        "paged_attention": ("triton", "mosaic"),
        "quant_matmul": ("triton", "mosaic"),
        "sample_topk": ("triton",),
    },
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """``why``: where the tile comes from; ``passed_over``: "name: reason" of each implementation before this one."""

    op: str
    implementation: str
    tile: Tile
    why: str
    passed_over: tuple[str, ...]

    def __str__(self) -> str:
        tile = ", ".join(f"{name}={value}" for name, value in self.tile.items())
        first = f"{self.op}: {self.implementation}" + (f" ({tile})" if tile else "") + f": {self.why}"
        return "\n  not ".join((first, *self.passed_over))


def explain(op: str, problem: Any, target: Target, *, compile: bool = False) -> str:
    """Which implementation and tile run ``problem`` on ``target``, and why not the others.

    ``problem``: the op's Problem, or its fields as a mapping. ``compile``: also see whether the kernel compiles, as
    ``run`` does; this needs the target's compiler, not the target. Raises ValueError for an op that does not exist.
    """
    if isinstance(problem, Mapping):
        problem = _module(op, "problem").Problem(**problem)
    return str(choose(op, problem, target, compile))


def run(op: str, problem: Any, target: Target, *arrays: jax.Array | None) -> Any:
    """The op's result, by the implementation that ``choose`` names."""
    choice = choose(op, problem, target, True)
    with jax.named_scope(op):
        return call(choice.op, choice.implementation, problem, choice.tile, target, *arrays)


def call(op: str, name: str, problem: Any, tile: Tile, target: Target, *arrays: jax.Array | None) -> Any:
    """The op's result by this implementation and tile."""
    if name == REFERENCE:
        return _module(op, name).run(problem, *arrays)
    return _module(op, name).run(problem, tile, launch.on_gpu(target.capability), *arrays)


def tiles(op: str, name: str, problem: Any, target: Target) -> tuple[Tile, ...]:
    """An implementation's candidate tiles, the default first; plain JAX has one, which is empty. Raises
    NotImplementedError, with the reason, for a case that it does not cover."""
    return ({},) if name == REFERENCE else _module(op, name).tiles(problem, target)


@functools.cache  # what does not compile is tried, and reported, once
def choose(op: str, problem: Any, target: Target, compile: bool) -> Choice:
    """The first implementation that covers the problem and, if ``compile``, compiles: as tuned, else by default."""
    _module(op, REFERENCE)
    tuned = tuning.lookup(op, problem.key, target)
    names = IMPLEMENTATIONS.get(target.platform, {}).get(op, ())
    attempts = [(name, name, None) for name in names]
    if tuned is not None:
        attempts.insert(0, (f"{tuned.implementation} as tuned", tuned.implementation, tuned))
    passed_over, broken = [], []
    for label, name, measured in attempts:
        if name == REFERENCE:
            break
        try:
            tile, why = _tile(op, name, problem, target, measured)
            if compile and target.platform == "cuda":
                _try(op, name, problem, tile, target)
        except NotImplementedError as error:
            passed_over.append(f"{label}: {error}")
        except Exception as error:  # a compiler may raise anything
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            passed_over.append(f"{label}: it does not work here ({reason})")
            broken.append(f"{label} ({reason})")
        else:
            return _chosen(Choice(op, name, tile, why, tuple(passed_over)), broken, target)
    if tuned is not None and tuned.implementation == REFERENCE:
        why = tuned.why
    else:
        why = "plain JAX" if names else f"the only one for {target.platform}"
    return _chosen(Choice(op, REFERENCE, {}, why, tuple(passed_over)), broken, target)


def _tile(op: str, name: str, problem: Any, target: Target, tuned: tuning.Tuned | None) -> tuple[Tile, str]:
    default = tiles(op, name, problem, target)[0]
    if tuned is not None:
        return tuned.tile, tuned.why
    return default, "default tile" if default else "no tile to choose"


def _chosen(choice: Choice, broken: list[str], target: Target) -> Choice:
    for name in broken:
        log.warning("%s on %s: %s serves instead of %s", choice.op, target.kind, choice.implementation, name)
    return choice


def _try(op: str, name: str, problem: Any, tile: Tile, target: Target) -> None:
    """Compiles the kernel by itself before it is part of a program, and where the target is at hand runs it once, on
    zeros: the last assembler and the launch itself may refuse too."""
    run = jax.jit(functools.partial(call, op, name, problem, tile, target))
    lowered = run.trace(*problem.inputs()).lower(lowering_platforms=("cuda",))
    if jax.default_backend() == "gpu" and Target.of(jax.devices()[0]) == target:
        zeros = [x if x is None else np.zeros(x.shape, x.dtype) for x in problem.inputs()]
        jax.block_until_ready(lowered.compile()(*zeros))


def _module(op: str, name: str) -> Any:
    try:
        return importlib.import_module(f"pallas_kernels.{op}.{name}")
    except ModuleNotFoundError as error:
        if error.name == f"pallas_kernels.{op}":
            raise ValueError(f"no op {op!r}") from error
        raise
