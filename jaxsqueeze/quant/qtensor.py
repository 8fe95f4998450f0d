"""A quantised weight as one pytree. Model code multiplies by it and knows no scheme."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxsqueeze.quant.rotation import rotate
from jaxsqueeze.quant.scheme import Scheme
from pallas_kernels.quant_matmul import packing
from pallas_kernels.quant_matmul.api import quant_matmul
from pallas_kernels.quant_matmul.problem import Format, Problem
from pallas_kernels.target import Target

_BLOCK = 1 << 22  # weights quantised at once on the host: bounds the temporaries


@struct.dataclass
class QTensor:
    """Stands for a weight of ``shape = (*out, in)``; arrays as pallas_kernels/quant_matmul/packing.py lays them out,
    with the ``out`` axes as one. ``order``: the inputs that the codes belong to, where they are not in order.
    ``rotated``: the codes are those of the weight with its inputs rotated (see rotation.py)."""

    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    format: Format = struct.field(pytree_node=False)
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    order: jax.Array | None = None  # i32[in]
    rotated: bool = struct.field(pytree_node=False, default=False)

    def matmul(self, x_TI: jax.Array, target: Target) -> jax.Array:
        """``x[T, in] @ weight.T`` -> f32[T, *out]. Rotated inputs have no outliers: of int8 codes a CPU takes them in
        int8 too, nothing is faster there."""
        format = self.format
        if self.order is not None:
            x_TI = jnp.take(x_TI, self.order, axis=1, unique_indices=True, mode="clip")
        if self.rotated:
            in_integers = format == "int8" and target.platform == "cpu"
            x_TI = rotate(x_TI) if in_integers else rotate(x_TI).astype(x_TI.dtype)
            format = "w8a8" if in_integers else format
        y = quant_matmul(x_TI, self.codes, self.scales, self.zeros, format=format, target=target)
        return y.reshape(x_TI.shape[0], *self.shape[:-1])

    def take(self, rows_T: jax.Array) -> jax.Array:
        """f32[T, in]: rows of a weight [out, in], as ``jnp.take(weight, rows, axis=0, mode="clip")``."""
        take = functools.partial(jnp.take, indices=rows_T, mode="clip")
        axis = self.scales.ndim - 1  # of outputs
        zeros = None if self.zeros is None else take(self.zeros, axis=axis)
        scales = take(self.scales, axis=axis)
        return self._undone(packing.dequantise(take(self.codes, axis=0), scales, zeros, self.format, self.shape[-1]))

    def dequantise(self) -> jax.Array:
        """f32[*out, in]: the weight that this stands for."""
        weight = packing.dequantise(self.codes, self.scales, self.zeros, self.format, self.shape[-1])
        return self._undone(weight).reshape(self.shape)

    def _undone(self, weight_OI: jax.Array) -> jax.Array:
        """Inputs as the model has them."""
        if self.rotated:
            weight_OI = rotate(weight_OI)
        return weight_OI if self.order is None else weight_OI[:, jnp.argsort(self.order)]

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """What a checkpoint stores of it."""
        arrays = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros, "order": self.order}
        return {name: array for name, array in arrays.items() if array is not None}


def from_arrays(arrays: dict[str, Any], scheme: Scheme, shape: tuple[int, ...]) -> QTensor:
    """The QTensor of what ``arrays`` gave, or of their abstract kind."""
    codes, scales, zeros, order = map(arrays.get, ("codes", "scales", "zeros", "order"))
    return QTensor(codes, scales, zeros, scheme.format, shape, order, scheme.rotated)


def abstract(scheme: Scheme, shape: tuple[int, ...]) -> QTensor:
    """Shapes and types of a weight of ``shape = (*out, in)`` in ``scheme``."""
    out = math.prod(shape[:-1])
    problem = Problem(0, out, shape[-1], "float32", scheme.format, scheme.group, scheme.zeros, scheme.scale_dtype)
    order = jax.ShapeDtypeStruct(shape[-1:], jnp.int32) if scheme.ordered else None
    return QTensor(*problem.inputs()[1:], scheme.format, shape, order, scheme.rotated)


def quantise(weight: jax.Array, scheme: Scheme) -> QTensor:
    """Round-to-nearest codes of ``weight [*out, in]``."""
    matrix = weight.reshape(math.prod(weight.shape[:-1]), weight.shape[-1])
    return QTensor(*_quantise(matrix, scheme), scheme.format, weight.shape, rotated=scheme.rotated)


def quantise_on_host(weight: np.ndarray, scheme: Scheme) -> QTensor:
    """As ``quantise``, in numpy arrays, some rows at a time: its private memory is little beside the result."""
    like = abstract(scheme, weight.shape)
    made = jax.tree.map(lambda s: np.empty(s.shape, s.dtype), like)
    matrix = weight.reshape(-1, weight.shape[-1])
    rows = max(1, _BLOCK // matrix.shape[1])
    for first in range(0, len(matrix), rows):
        part = slice(first, first + rows)
        codes, *others = _quantise(matrix[part], scheme)
        made.codes[part] = codes
        for whole, piece in zip((made.scales, made.zeros), others, strict=True):
            if piece is not None:
                whole[..., part] = piece
    return made


@functools.partial(jax.jit, static_argnums=1)
def _quantise(matrix: jax.Array, scheme: Scheme) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    dtype = jnp.dtype(scheme.scale_dtype)
    if scheme.rotated:
        matrix = rotate(matrix)
    return packing.quantise(matrix, scheme.format, scheme.group, scheme.zeros, dtype)
