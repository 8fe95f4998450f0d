"""Writes new keys or values into their pages, quantising on the way where the pages hold codes."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels import arguments, dispatch
from pallas_kernels.kv_write.problem import Problem, format_of
from pallas_kernels.target import Target


def kv_write(
    pages: Num[Array, "pages K page_size W"],
    scales: Float32[Array, "pages K page_size"] | None,
    new: Float[Array, "T K D"],
    page: Int32[Array, " T"],
    offset: Int32[Array, " T"],
    *,
    target: Target,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns ``pages`` with ``new[t]`` at ``[page[t], :, offset[t]]``, and their ``scales``. Tokens that must not be
    kept name page 0, whose content is of no consequence.

    Pages of int8 (W = D) hold ``round(x / scale)`` with ``scale = max|x| / 127`` per token and head; of uint8
    (W = D / 2), two 4-bit codes a byte with ``max|x| / 7``: code + 8, dimension d low and d + D / 2 high. An all-zero
    head has scale 0. Pages of another unsigned type hold bit patterns (XLA:CPU has no bf16 scatter: it would convert
    the whole pool to f32 and back at each write). Raises ValueError for arrays that do not fit.
    """
    problem = Problem(
        *new.shape, page_size=pages.shape[2], dtype=new.dtype.name, format=format_of(pages.dtype, new.dtype)
    )
    if problem.format == "int4" and problem.D % 2:
        raise ValueError(f"a byte holds two int4 codes of a head: D must be even, got {problem.D}")
    arrays = {"pages": pages, "scales": scales, "new": new, "page": page, "offset": offset}
    arguments.check(f"new {problem.dtype}{list(new.shape)}", arrays, problem.inputs(pages.shape[0]))
    return dispatch.run("kv_write", problem, target, *arrays.values())
