"""Matmul with weights as they are stored: ``[out, in]``."""

from __future__ import annotations

from jaxtyping import Array, Float, UInt16

from pallas_kernels.linear import lanes, reference


def linear(
    x: Float[Array, "T in"], weight: Float[Array, "out in"], bits: UInt16[Array, "out in"] | None = None
) -> Float[Array, "T out"]:
    """``x @ weight.T``, accumulated in f32 and not rounded. Raises ValueError if the contracted sizes differ.

    ``bits``: bf16 weights once more as integers, from the same memory, where the platform multiplies those faster.
    """
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {x.shape} does not fit weight {weight.shape}")
    if bits is not None and x.shape[0] == 1:
        return lanes.linear(x, bits)
    return reference.linear(x, weight)
