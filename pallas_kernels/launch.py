"""One launch of one Triton kernel, as data: the same description is run on a GPU through jax-triton, run by Triton's
interpreter in tests, and compiled to machine code for the resource table.

Every kernel takes pointers to its inputs, then pointers to its outputs, then compile-time constants, nothing else.
Sizes and strides are constants: a row stride that is known to be a multiple of 16 bytes is what lets Triton load 16
bytes a thread, and jax-triton says nothing of the divisibility of run-time scalars. An output may be aliased to an
input: the kernel writes what it changes to the output pointer, which is the same memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

Launcher = Callable[..., tuple[jax.Array, ...]]  # (launch, *inputs) -> outputs


@dataclasses.dataclass(frozen=True)
class Launch:
    kernel: Any  # of @triton.jit
    grid: tuple[int, ...]  # at most three sizes
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aliases: Mapping[int, int] = dataclasses.field(default_factory=dict)  # input index -> output index


def on_gpu(capability: int) -> Launcher:
    """Launches inside a jitted program for this compute capability."""

    def launcher(launch: Launch, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        import jax_triton

        return tuple(
            jax_triton.triton_call(
                *inputs,
                kernel=launch.kernel,
                name=launch.kernel.__name__,
                grid=launch.grid,
                out_shape=launch.outputs,
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
                input_output_aliases=dict(launch.aliases),
                compute_capability=capability,
                **launch.constants,
            )
        )

    return launcher
