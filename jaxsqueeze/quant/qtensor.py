"""A quantised weight as one pytree. Model code multiplies by it and knows no scheme."""

from __future__ import annotations

import math

import jax
from flax import struct

from pallas_kernels.quant_matmul import packing
from pallas_kernels.quant_matmul.api import quant_matmul
from pallas_kernels.quant_matmul.problem import Format
from pallas_kernels.target import Target


@struct.dataclass
class QTensor:
    """Stands for a weight of ``shape = (*out, in)``; arrays as pallas_kernels/quant_matmul/api.py lays them out, with
    the ``out`` axes as one."""

    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    format: Format = struct.field(pytree_node=False)
    shape: tuple[int, ...] = struct.field(pytree_node=False)

    def matmul(self, x_TI: jax.Array, target: Target) -> jax.Array:
        """``x[T, in] @ weight.T`` -> f32[T, *out]."""
        y = quant_matmul(x_TI, self.codes, self.scales, self.zeros, format=self.format, target=target)
        return y.reshape(x_TI.shape[0], *self.shape[:-1])


def quantise(weight: jax.Array, format: Format, group: int | None = None, *, zero_points: bool = False) -> QTensor:
    """Round-to-nearest codes of ``weight [*out, in]``."""
    matrix = weight.reshape(math.prod(weight.shape[:-1]), weight.shape[-1])
    return QTensor(*packing.quantise(matrix, format, group, zero_points), format=format, shape=weight.shape)
