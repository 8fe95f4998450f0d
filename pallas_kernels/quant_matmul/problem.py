"""What a matmul with quantised weights is, apart from its data."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

Format = Literal["bf16", "int8", "fp8", "w8a8", "int4", "int2"]
PARTS = {"int4": 2, "int2": 4}  # codes in a byte, each of another part of the inputs
GROUPS = (32, 64, 128)
STORAGE = {"int8": "int8", "w8a8": "int8", "fp8": "float8_e4m3fn", "int4": "uint8", "int2": "uint8"}


def padded(width: int, format: Format, group: int) -> int:
    """``width`` rounded up so that each part of it is whole groups."""
    return -(-width // (PARTS[format] * group)) * PARTS[format] * group


@dataclasses.dataclass(frozen=True)
class Problem:
    """``x[T, width] @ weight[out, width].T``, the weight in ``format``; layouts are in ``packing.py``.

    Raises ValueError for a format or group that does not exist.
    """

    T: int
    out: int
    width: int
    dtype: str  # of x
    format: Format
    group: int = 0  # inputs that share a scale; 0: one scale for each output
    zeros: bool = False
    scale_dtype: str = "float32"
    storage: str = "bfloat16"  # of the codes; the format says it, except for "bf16"

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise ValueError(f"no format {self.format!r}: there are {', '.join(get_args(Format))}")
        if self.group not in (GROUPS if self.format in PARTS else (0,)):
            raise ValueError(
                f"{self.format} weights have groups of {GROUPS if self.format in PARTS else 0}, got {self.group}"
            )
        object.__setattr__(self, "storage", STORAGE.get(self.format, self.storage))

    @property
    def padded(self) -> int:
        """Inputs that have codes; x counts as 0 beyond ``width``."""
        return padded(self.width, self.format, self.group) if self.group else self.width

    @property
    def parts(self) -> int:
        return PARTS.get(self.format, 1)

    @property
    def key(self) -> str:
        """T counts by powers of two, as tiles do."""
        weight = f"{self.storage} weight" if self.format == "bf16" else self.format
        if self.group:
            weight += f" group{self.group} {self.scale_dtype}" + (" zeros" if self.zeros else "")
        bucket = 1 << max(0, self.T - 1).bit_length()
        return f"{weight} x {self.dtype} T{bucket} out{self.out} in{self.width}"

    def inputs(self) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        x = jax.ShapeDtypeStruct((self.T, self.width), self.dtype)
        codes = jax.ShapeDtypeStruct((self.out, self.padded // self.parts), self.storage)
        if self.format == "bf16":
            return x, codes, None, None
        if not self.group:
            return x, codes, jax.ShapeDtypeStruct((self.out,), jnp.float32), None
        scales = jax.ShapeDtypeStruct((self.padded // self.group, self.out), self.scale_dtype)
        return x, codes, scales, scales if self.zeros else None
