"""Runs a ``Launch`` in Triton's interpreter: the kernel's own Python, one program after another, on numpy memory.

``TRITON_INTERPRET=1`` must be set before triton is imported (tests/conftest.py). Outputs that are not aliased to an
input start as NaN or the largest integer, so that a place nobody wrote shows.

The interpreter keeps bfloat16 as uint16: it would convert, add and multiply the bit patterns as if they were numbers,
and its own rounding to bfloat16 loses a carry. Here the operations that kernels use see the numbers.

It also replaces triton.language at every call of a device function, which takes half the time of a small kernel. Here
once a launch for each module of device functions.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from pallas_kernels.launch import Launch


class _Original:
    cast_impl = InterpreterBuilder.cast_impl
    binary_op = InterpreterBuilder.binary_op
    create_dot = InterpreterBuilder.create_dot
    patch_lang = staticmethod(triton_interpreter._patch_lang)


def _cast(self: InterpreterBuilder, x: TensorHandle, dtype: tl.dtype) -> TensorHandle:
    source, dtype = x.dtype.scalar, dtype.scalar
    if source != tl.bfloat16 and dtype != tl.bfloat16:
        return _Original.cast_impl(self, x, dtype)
    numbers = x.data.view(ml_dtypes.bfloat16) if source == tl.bfloat16 else x.data
    if dtype == tl.bfloat16:
        return TensorHandle(numbers.astype(ml_dtypes.bfloat16).view(np.uint16), dtype)
    return _Original.cast_impl(self, TensorHandle(numbers.astype(np.float32), tl.float32), dtype)


def _widened(self: InterpreterBuilder, x: TensorHandle) -> TensorHandle:
    return _cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x


def _binary(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, op: Callable[..., np.ndarray]) -> TensorHandle:
    out = _Original.binary_op(self, _widened(self, a), _widened(self, b), op)
    return _cast(self, out, tl.bfloat16) if a.dtype.scalar == tl.bfloat16 and out.data.dtype != bool else out


def _dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object) -> TensorHandle:
    return _Original.create_dot(self, _widened(self, a), _widened(self, b), *rest)


_patched: set[int] = set()  # modules, in the launch that runs


def _patch_lang(fn: Callable[..., object]) -> object:
    """Only a launch restores what it gets, and a launch comes first."""
    module = id(fn.__globals__)
    if module in _patched:
        return None
    _patched.add(module)
    return _Original.patch_lang(fn)


InterpreterBuilder.cast_impl, InterpreterBuilder.binary_op, InterpreterBuilder.create_dot = _cast, _binary, _dot
triton_interpreter._patch_lang = _patch_lang


class Memory:
    """What the interpreter asks of a torch tensor, over a numpy array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> Memory:
        return self

    def cpu(self) -> Memory:
        return self

    def new_empty(self, *_, **__) -> Memory:
        return Memory(self.array)

    def set_(self, storage: Memory, *_) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return ()

    def copy_(self, _: Memory) -> None:
        """Nothing moved: host and device are the same memory."""


def interpret(launch: Launch, *inputs: object) -> tuple[jnp.ndarray, ...]:
    """A ``Launcher``."""
    arrays = [np.array(x) for x in inputs]  # copies: a kernel must not change what it was not given to change
    aliased = {output: arrays[index] for index, output in launch.aliases.items()}
    outputs = [aliased.get(i, _poisoned(o)) for i, o in enumerate(launch.outputs)]
    memory = [Memory(x) for x in (*arrays, *outputs)]
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    before = {i: x.tobytes() for i, x in enumerate(arrays) if i not in launch.aliases}
    _patched.clear()
    launch.kernel[launch.grid](*memory, **launch.constants, **options)
    for i, old in before.items():
        assert arrays[i].tobytes() == old, f"{launch.kernel.__name__} changed input {i}"
    return tuple(jnp.asarray(x) for x in outputs)


def _poisoned(shape: object) -> np.ndarray:
    dtype = jnp.dtype(shape.dtype)
    value = np.nan if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max
    return np.full(shape.shape, value, dtype)
