"""Compiles an op's Mosaic GPU kernels for an H200 that is not there, in a process of its own: the default tile of each
representative problem that they cover.

    python -m tests.gpu_compile.compile_mosaic OP

Prints the key of each problem that is compiled.
"""

from __future__ import annotations

import functools
import sys

import jax

from pallas_kernels import dispatch
from pallas_kernels.representative import PROBLEMS
from pallas_kernels.target import H200
from tests.gpu_compile.compile_step import topology_sharding


def main(op: str) -> None:
    sharding = topology_sharding("h200")
    for problem in PROBLEMS[op]:
        try:
            tile = dispatch.tiles(op, "mosaic", problem, H200)[0]
        except NotImplementedError:
            continue
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), problem.inputs())
        jax.jit(functools.partial(dispatch.call, op, "mosaic", problem, tile, H200)).lower(*placed).compile()
        print(problem.key)


if __name__ == "__main__":
    main(*sys.argv[1:])
