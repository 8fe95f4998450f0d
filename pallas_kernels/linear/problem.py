"""What a matmul with unquantised weights is, apart from its data."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Problem:
    """``x[T, width] @ weight[out, width].T``."""

    T: int
    out: int
    width: int
    dtype: str
    bits: bool  # the weights come as integers too

    @property
    def key(self) -> str:
        return f"{self.dtype} T{self.T} out{self.out} in{self.width}"

    def inputs(self) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        x = jax.ShapeDtypeStruct((self.T, self.width), self.dtype)
        weight = jax.ShapeDtypeStruct((self.out, self.width), self.dtype)
        return x, weight, jax.ShapeDtypeStruct(weight.shape, jnp.uint16) if self.bits else None
