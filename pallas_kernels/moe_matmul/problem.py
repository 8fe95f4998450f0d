"""What a grouped matmul is, apart from its data."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.quant_matmul import problem as quant_matmul


@dataclasses.dataclass(frozen=True)
class Problem(quant_matmul.Problem):
    """T rows, each multiplied with the weight of one of E experts; for the other fields see ``quant_matmul``."""

    E: int = dataclasses.field(kw_only=True)

    @property
    def expert(self) -> quant_matmul.Problem:
        """The matmul of one expert with all rows."""
        fields = (f.name for f in dataclasses.fields(quant_matmul.Problem))
        return quant_matmul.Problem(**{name: getattr(self, name) for name in fields})

    @property
    def key(self) -> str:
        return f"E{self.E} {super().key}"

    def inputs(self) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        x, *weight = super().inputs()
        experts = jax.tree.map(lambda a: jax.ShapeDtypeStruct((self.E, *a.shape), a.dtype), weight)
        return x, *experts, jax.ShapeDtypeStruct((self.E,), jnp.int32)
