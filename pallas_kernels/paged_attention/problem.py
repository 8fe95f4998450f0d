"""What a paged attention is, apart from its data."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import problem as kv_write
from pallas_kernels.kv_write.problem import KVFormat

# V is (codes * unit) * (scales / unit), and the right factor near V's own size: weights times it stay normal fp16.
V_UNIT = {"same": 1.0, "bits": 1.0, "int8": 1 / 64, "int4": 1 / 4}


@dataclasses.dataclass(frozen=True)
class Problem:
    """N rows of Q queries, K KV heads, G query heads per KV head, D values per head, P pages a row in the table."""

    N: int
    Q: int
    K: int
    G: int
    D: int
    page_size: int
    P: int
    dtype: str  # of q and of the result
    k_format: KVFormat
    v_format: KVFormat
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def key(self) -> str:
        extras = (self.window and f" window{self.window}", self.softcap and " softcap", self.sinks and " sinks")
        return (
            f"{self.k_format}/{self.v_format} {self.dtype} N{self.N} Q{self.Q} K{self.K} G{self.G} D{self.D}"
            f" page{self.page_size} P{self.P}" + "".join(filter(None, extras))
        )

    def pool(self, format: KVFormat, pages: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct | None]:
        """Pages of K or V and their scales: as ``kv_write`` writes them."""
        write = kv_write.Problem(T=1, K=self.K, D=self.D, page_size=self.page_size, dtype=self.dtype, format=format)
        return write.inputs(pages)[:2]

    def inputs(self, pages: int = 2) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        """q, k_pages, v_pages, table, base, positions, k_scales, v_scales, sinks."""
        k_pages, k_scales = self.pool(self.k_format, pages)
        v_pages, v_scales = self.pool(self.v_format, pages)
        return (
            jax.ShapeDtypeStruct((self.N, self.Q, self.K, self.G, self.D), self.dtype),
            k_pages,
            v_pages,
            jax.ShapeDtypeStruct((self.N, self.P), jnp.int32),
            jax.ShapeDtypeStruct((self.N,), jnp.int32),
            jax.ShapeDtypeStruct((self.N, self.Q), jnp.int32),
            k_scales,
            v_scales,
            jax.ShapeDtypeStruct((self.K, self.G), jnp.float32) if self.sinks else None,
        )
