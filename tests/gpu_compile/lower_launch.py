"""Lowers one launch for an H200 in a process of its own and prints the call it makes:

python -m tests.gpu_compile.lower_launch plugin|jax_triton
"""

from __future__ import annotations

import functools
import sys

import jax

from pallas_kernels import launch
from pallas_kernels.kv_write import triton
from pallas_kernels.kv_write.problem import Problem
from pallas_kernels.target import H200

PROBLEM = Problem(T=4, K=8, D=128, page_size=16, dtype="bfloat16", format="int8")


def main(way: str) -> None:
    launchers = {
        "plugin": launch.on_gpu(H200.capability),
        "jax_triton": functools.partial(launch.by_jax_triton, H200.capability),
    }
    run = functools.partial(triton.run, PROBLEM, triton.tiles(PROBLEM, H200)[0], launchers[way])
    text = jax.jit(run).trace(*PROBLEM.inputs()).lower(lowering_platforms=("cuda",)).as_text()
    print(*(line for line in text.splitlines() if "custom_call" in line), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
