"""What each Triton kernel takes of a GPU, found without one.

Every representative problem (representative.py) is run with a launcher that only records; each launch is compiled for
five compute capabilities as it is for a device. Triton's ptxas assembles it and says what it takes; on a device jax
assembles the same PTX, perhaps by another version.
"""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.launch import Launch, compile_launch
from pallas_kernels.occupancy import blocks_per_sm
from pallas_kernels.representative import PROBLEMS
from pallas_kernels.target import A100, H200, Target
from pallas_kernels.tuning import Tile

DEVICES = (
    A100,
    Target("cuda", "NVIDIA GeForce RTX 3090", 86, 82),
    Target("cuda", "NVIDIA GeForce RTX 4090", 89, 128),
    H200,
    Target("cuda", "NVIDIA B200", 100, 148),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel of one problem on one capability. Where no tile covers the problem, ``kernel`` is "none", ``tile`` the
    reason, and the numbers are 0."""

    op: str
    problem: str
    kernel: str
    capability: int
    tile: str
    warps: int = 0
    stages: int = 0
    registers: int = 0  # of a thread
    spills: int = 0  # bytes of a thread that do not fit the registers: stack, or stored and loaded again
    shared: int = 0  # bytes of a block
    blocks: int = 0  # of an SM, see occupancy.py

    @property
    def choice(self) -> tuple[object, ...]:
        """What does not depend on the version of Triton."""
        return self.op, self.problem, self.kernel, self.capability, self.tile, self.warps, self.stages

    @property
    def fault(self) -> str | None:
        if self.kernel == "none":
            return None
        if not self.registers:
            return "does not compile"
        if self.spills:
            return f"spills {self.spills} bytes of registers: a default tile must not"
        return None if self.blocks else "cannot be launched: more registers or shared memory than there is"


def describe(problem: Any) -> str:
    """The fields of a problem that differ from their defaults."""
    fields = ((f, getattr(problem, f.name)) for f in dataclasses.fields(problem))
    return " ".join(f"{f.name}={value}" for f, value in fields if value != f.default)


def launches(op: str, problem: Any, tile: Tile) -> list[tuple[Launch, list[jnp.dtype]]]:
    """The kernel launches of the op's Triton implementation, each with the types of its pointers."""
    found = []

    def record(launch: Launch, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        found.append((launch, [jnp.dtype(a.dtype) for a in (*inputs, *launch.outputs)]))
        return tuple(jnp.zeros(o.shape, o.dtype) for o in launch.outputs)

    module = importlib.import_module(f"pallas_kernels.{op}.triton")
    jax.eval_shape(lambda *arrays: module.run(problem, tile, record, *arrays), *problem.inputs())
    return found


def measure(op: str, problem: Any) -> list[Row]:
    """Rows of the default tile on each of ``DEVICES``."""
    rows: dict[Row, None] = {}
    for target in DEVICES:
        try:
            tile = dispatch.tiles(op, "triton", problem, target)[0]
        except NotImplementedError as error:
            rows[Row(op, describe(problem), "none", target.capability, str(error))] = None
            continue
        for launch, dtypes in launches(op, problem, tile):
            row = Row(
                op, describe(problem), launch.kernel.__name__, target.capability,
                " ".join(f"{name}={value}" for name, value in tile.items()), launch.num_warps, launch.num_stages,
            )  # fmt: skip
            rows[_taken(row, launch, dtypes)] = None
    return list(rows)


def _taken(row: Row, launch: Launch, dtypes: list[jnp.dtype]) -> Row:
    """The row with what its kernel takes; as it is if the kernel does not compile."""
    try:
        compiled = compile_launch(launch, dtypes, row.capability)
        registers, spills = _assemble(compiled.asm["ptx"], row.capability)
    except Exception as error:  # a compiler may raise anything
        print(f"\n{row}:\n{error}", file=sys.stderr)
        return row
    shared = compiled.metadata.shared
    blocks = blocks_per_sm(row.capability, row.warps, registers, shared)
    return dataclasses.replace(row, registers=registers, spills=spills, shared=shared, blocks=blocks)


def _assemble(ptx: str, capability: int) -> tuple[int, int]:
    """Registers of a thread, and its spilled bytes."""
    from triton.backends.nvidia.compiler import get_ptxas

    name = f"--gpu-name=sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", name, file.name, "-o", os.devnull]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    of_memory = [int(x) for x in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", said)]
    return int(re.search(r"Used (\d+) registers", said)[1]), max(of_memory)


def measure_all() -> list[Row]:
    """Every op's representative problems, in two processes at most."""
    jobs = [(op, problem) for op, problems in PROBLEMS.items() for problem in problems]
    context = multiprocessing.get_context("spawn")
    ignored = signal.SIGINT, signal.SIG_IGN  # by workers: one that Ctrl-C ends while it holds a lock hangs the others
    with ProcessPoolExecutor(2, context, signal.signal, ignored) as pool:
        futures = [pool.submit(measure, *job) for job in jobs]
        try:
            for done, _ in enumerate(as_completed(futures), 1):
                print(f"\r{done} of {len(jobs)} problems", end="", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    print(file=sys.stderr)
    return [row for future in futures for row in future.result()]
