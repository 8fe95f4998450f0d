"""One launch of one Triton kernel, as data: the same description is launched in a jitted program, run by Triton's
interpreter in tests, and compiled to machine code for the resource table.

Every kernel takes pointers to its inputs, then pointers to its outputs, then compile-time constants, nothing else.
Sizes and strides are constants: a row stride that is known to be a multiple of 16 bytes is what lets Triton load 16
bytes a thread. An output may be aliased to an input: the kernel writes what it changes to the output pointer, which is
the same memory.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Launcher = Callable[..., tuple[jax.Array, ...]]  # (launch, *inputs) -> outputs

_POINTERS = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "float8_e4m3fn": "*fp8e4nv",
    "int8": "*i8",
    "uint8": "*u8",
    "int32": "*i32",
    "uint32": "*u32",
    "bool": "*i1",
}

# The PTX to write: the oldest that knows the capability and that CUDA 12.6 reads, which jax asks for at least. By
# itself Triton writes the newest that its own assembler reads: 3.9 writes 9.4, which jax's refused (CUDA 13.0).
_PTX_VERSION = 85
_PTX_VERSIONS = {100: 86, 103: 88, 120: 87, 121: 88}


@dataclasses.dataclass(frozen=True)
class Launch:
    kernel: Any  # of @triton.jit
    grid: tuple[int, ...]  # at most three sizes
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aliases: Mapping[int, int] = dataclasses.field(default_factory=dict)  # input index -> output index


def compile_launch(launch: Launch, dtypes: Sequence[jnp.dtype], capability: int) -> Any:
    """Triton's compiled kernel for pointers to these types, divisible by 16: ``.asm["ptx"]``, ``.metadata``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = dict(zip(launch.kernel.arg_names, (_POINTERS[jnp.dtype(d).name] for d in dtypes), strict=False))
    source = ASTSource(
        launch.kernel,
        signature=pointers | dict.fromkeys(launch.constants, "constexpr"),
        constexprs=dict(launch.constants),
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(dtypes))},
    )
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": True,
        "ptx_version": _PTX_VERSIONS.get(capability, _PTX_VERSION),
    }
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def on_gpu(capability: int) -> Launcher:
    """Launches inside a jitted program for this compute capability.

    jax-triton 0.3, the one that goes with all our versions of jax and Triton, makes a call that XLA keeps out of
    command buffers: compiled for an H200, a decode step of 32 layers was 33 command buffers with 96 single launches
    between them. Through the newer call of jax's CUDA plug-in, which jax-triton 0.4 makes too, it is one command
    buffer. So that is what is called wherever jaxlib has it.
    """
    try:
        from jaxlib import gpu_triton

        gpu_triton.TritonKernelCall  # noqa: B018 (not there without a plug-in)
    except (ImportError, AttributeError):
        return functools.partial(by_jax_triton, capability)
    return functools.partial(by_plugin, capability, gpu_triton)


def by_plugin(capability: int, plugin: Any, launch: Launch, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    dtypes = [a.dtype for a in (*inputs, *launch.outputs)]
    compiled = compile_launch(launch, dtypes, capability)
    kernel = plugin.TritonKernel(
        compiled.metadata.name, launch.num_warps, 1, compiled.metadata.shared, compiled.asm["ptx"], "", capability
    )
    arrays = [plugin.create_array_parameter(0, 16)] * len(dtypes)
    call = plugin.TritonKernelCall(kernel, *(*launch.grid, 1, 1)[:3], arrays)
    name = launch.kernel.__name__
    ffi_call = jax.ffi.ffi_call("triton_kernel_call_ffi", launch.outputs, input_output_aliases=dict(launch.aliases))
    with jax.named_scope(name):
        return tuple(ffi_call(*inputs, opaque=zlib.compress(call.to_proto(name, b""))))


def by_jax_triton(capability: int, launch: Launch, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    import jax_triton

    name = launch.kernel.__name__
    with jax.named_scope(name):
        return tuple(
            jax_triton.triton_call(
                *inputs,
                kernel=launch.kernel,
                name=name,
                grid=launch.grid,
                out_shape=launch.outputs,
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
                input_output_aliases=dict(launch.aliases),
                compute_capability=capability,
                **launch.constants,
            )
        )
