"""Matmul with weights as they are stored: ``[out, in]``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt16

from pallas_kernels import dispatch
from pallas_kernels.linear.problem import Problem
from pallas_kernels.target import Target


def linear(
    x: Float[Array, "T in"],
    weight: Float[Array, "out in"],
    bits: UInt16[Array, "out in"] | None = None,
    *,
    target: Target,
) -> jax.Array:
    """``x @ weight.T`` as f32[T, out], accumulated in f32 and not rounded. Raises ValueError for arrays that do
    not fit.

    ``bits``: bf16 weights once more as integers, from the same memory, where the platform multiplies those faster.
    """
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {x.shape} does not fit weight {weight.shape}")
    if bits is not None and (bits.shape, bits.dtype) != (weight.shape, jnp.uint16):
        raise ValueError(
            f"bits {bits.dtype}{list(bits.shape)} are not those of weight {weight.dtype}{list(weight.shape)}"
        )
    problem = Problem(*x.shape[:1], *weight.shape, dtype=x.dtype.name, bits=bits is not None)
    return dispatch.run("linear", problem, target, x, weight, bits)
