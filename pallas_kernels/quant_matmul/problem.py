"""What a matmul with quantised weights is, apart from its data."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self, get_args

import jax
import jax.numpy as jnp

Format = Literal["bf16", "int8", "fp8", "w8a8", "int4", "fp4", "int2"]
PARTS = {"int4": 2, "fp4": 2, "int2": 4}  # codes in a byte, each of another part of the inputs
MIDDLE = {"int4": 8, "int2": 2}  # the code of a weight of zero, without zero points; others have a sign
GROUPS = (32, 64, 128)
GROUPS_OF = {"int8": (0, *GROUPS), "fp8": (0, *GROUPS), "int4": GROUPS, "fp4": GROUPS, "int2": GROUPS}
ZERO_POINTS = ("int8", "int4", "int2")  # formats whose groups may have them
SCALE_DTYPES = ("float16", "bfloat16", "float32")
STORAGE = {
    "int8": "int8",
    "w8a8": "int8",
    "fp8": "float8_e4m3fn",
    "int4": "uint8",
    "fp4": "uint8",
    "int2": "uint8",
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """``x[T, width] @ weight[out, width].T``, the weight in ``format``; layouts are in ``packing.py``.

    Raises ValueError for a format, group, zero points or type of scales that do not exist.
    """

    T: int
    out: int
    width: int
    dtype: str  # of x
    format: Format
    group: int = 0  # inputs that share a scale; 0: one scale for each output
    zeros: bool = False
    scale_dtype: str = "float32"  # of group scales and zeros
    storage: str = "bfloat16"  # of the codes; the format says it, except for "bf16"

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise ValueError(f"no format {self.format!r}: there are {', '.join(get_args(Format))}")
        groups = GROUPS_OF.get(self.format, (0,))
        if self.group not in groups:
            raise ValueError(f"{self.format} weights have groups of {groups}, got {self.group}")
        if self.zeros and not (self.group and self.format in ZERO_POINTS):
            raise ValueError(f"{self.format} weights with groups of {self.group} have no zero points")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"scales are {', '.join(SCALE_DTYPES)}, not {self.scale_dtype}")
        object.__setattr__(self, "storage", STORAGE.get(self.format, self.storage))

    @classmethod
    def of(
        cls,
        x: jax.Array,
        codes: jax.Array,
        scales: jax.Array | None,
        zeros: jax.Array | None,
        format: Format,
        **more: Any,
    ) -> Self:
        """The problem that these arrays are, if they fit (see ``check``): scales of groups have an axis more than those
        of outputs. ``more``: fields of a subclass."""
        group = 0
        if scales is not None and scales.ndim == codes.ndim:
            group = codes.shape[-1] * PARTS.get(format, 1) // max(1, scales.shape[-2])
        return cls(
            T=x.shape[0],
            out=codes.shape[-2],
            width=x.shape[1],
            dtype=x.dtype.name,
            format=format,
            group=group,
            zeros=zeros is not None,
            scale_dtype="float32" if scales is None else scales.dtype.name,
            storage=codes.dtype.name,
            **more,
        )

    @property
    def padded(self) -> int:
        """Inputs that have codes, so many that each part of them is whole groups; x counts as 0 beyond ``width``."""
        unit = self.parts * self.group or 1
        return -(-self.width // unit) * unit

    @property
    def parts(self) -> int:
        return PARTS.get(self.format, 1)

    @property
    def middle(self) -> int:
        return MIDDLE.get(self.format, 0)

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
