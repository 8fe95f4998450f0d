"""Writes new keys or values into their pages."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.kv_write import reference


def kv_write(
    pages: Num[Array, "pages K page_size D"],
    new: Float[Array, "T K D"],
    page: Int[Array, " T"],
    offset: Int[Array, " T"],
) -> Num[Array, "pages K page_size D"]:
    """Returns ``pages`` with ``new[t]`` at ``[page[t], :, offset[t]]``. Tokens that must not be kept name page 0.

    XLA:CPU has no bf16 scatter: it would convert the whole pool to f32 and back at each write. A pool of unsigned
    integers of the same width holds bit patterns and is written in place.
    """
    if new.shape[1:] != (pages.shape[1], pages.shape[3]):
        raise ValueError(f"new {new.shape} does not fit pages {pages.shape}")
    with jax.named_scope("kv_write"):
        return reference.kv_write(pages, new, page, offset)
