"""What a filter of logits is, apart from its data."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Problem:
    """B rows of V words."""

    B: int
    V: int

    @property
    def key(self) -> str:
        return f"B{self.B} V{self.V}"

    def inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        x = jax.ShapeDtypeStruct((self.B, self.V), jnp.float32)
        f32, i32 = (jax.ShapeDtypeStruct((self.B,), dtype) for dtype in (jnp.float32, jnp.int32))
        return x, i32, f32, f32
