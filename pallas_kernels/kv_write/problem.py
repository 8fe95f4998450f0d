"""What a KV write is, apart from its data."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

KVFormat = Literal["same", "bits", "int8", "int4"]
# same: as the new values are · bits: their bit patterns as unsigned integers · int8, int4: codes with one f32 scale per
# token and head, int4 packed split-half: byte d holds dimension d in its low nibble and d + D/2 in its high one.


def format_of(pages: jnp.dtype, dtype: jnp.dtype) -> KVFormat:
    """The format of pages of this storage type for values of ``dtype``. Raises ValueError if there is none."""
    pages, dtype = jnp.dtype(pages), jnp.dtype(dtype)
    if pages == dtype:
        return "same"
    if pages == jnp.int8:
        return "int8"
    if pages == jnp.uint8:
        return "int4"
    if jnp.issubdtype(pages, jnp.unsignedinteger) and pages.itemsize == dtype.itemsize:
        return "bits"
    raise ValueError(f"pages of {pages} cannot hold {dtype}: they are of the same type, its bits, int8 or packed int4")


@dataclasses.dataclass(frozen=True)
class Problem:
    """T tokens of K heads of D values go to pages of ``page_size`` tokens."""

    T: int
    K: int
    D: int
    page_size: int
    dtype: str  # of the new values
    format: KVFormat

    @property
    def key(self) -> str:
        return f"{self.format} {self.dtype} K{self.K} D{self.D} page{self.page_size}"

    @property
    def storage(self) -> jnp.dtype:
        bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[jnp.dtype(self.dtype).itemsize]
        return jnp.dtype({"same": self.dtype, "bits": bits, "int8": jnp.int8, "int4": jnp.uint8}[self.format])

    @property
    def width(self) -> int:
        """Stored elements of one token's head."""
        return self.D // 2 if self.format == "int4" else self.D

    def inputs(self, pages: int = 2) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        pool = jax.ShapeDtypeStruct((pages, self.K, self.page_size, self.width), self.storage)
        scales = jax.ShapeDtypeStruct((pages, self.K, self.page_size), jnp.float32)
        new = jax.ShapeDtypeStruct((self.T, self.K, self.D), self.dtype)
        where = jax.ShapeDtypeStruct((self.T,), jnp.int32)
        return pool, scales if self.format in ("int8", "int4") else None, new, where, where
