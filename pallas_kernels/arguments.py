"""The check of a public op's arrays against those of its problem."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax


def check(about: str, arrays: Mapping[str, jax.Array | None], expected: Iterable[jax.ShapeDtypeStruct | None]) -> None:
    """Raises ValueError, which begins with ``about``, for the first array of another shape or type."""
    for (name, array), wanted in zip(arrays.items(), expected, strict=True):
        if _described(array) != _described(wanted):
            raise ValueError(f"{about}: {name} should be {_described(wanted)}, got {_described(array)}")


def _described(array: jax.Array | jax.ShapeDtypeStruct | None) -> str:
    return "None" if array is None else f"{array.dtype.name}{list(array.shape)}"
