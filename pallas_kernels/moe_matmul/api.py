"""Matmul of rows with the weights of their experts, which may be quantised."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int32, Num

from pallas_kernels import dispatch
from pallas_kernels.moe_matmul.problem import Problem
from pallas_kernels.quant_matmul.problem import PARTS, Format
from pallas_kernels.target import Target


def moe_matmul(
    x: Float[Array, "T in"],
    codes: Num[Array, "E out bytes"],
    scales: Float[Array, "E out"] | Float[Array, "E groups out"] | None,
    zeros: Float[Array, "E groups out"] | None,
    group_sizes: Int32[Array, " E"],
    *,
    format: Format,
    target: Target,
) -> Float[Array, "T out"]:
    """``x[t] @ weight[expert of t].T`` in f32. Rows are sorted by expert: the first ``group_sizes[0]`` are the first
    expert's, and so on; rows after the last group give zeros, whatever they hold. Only weights of experts with rows are
    read.

    Each expert's weight is as in ``quant_matmul``, which see for the formats, their arithmetic and their layouts.
    Raises ValueError for arrays that do not fit.
    """
    group = 0
    if format in PARTS and scales is not None:
        group = codes.shape[2] * PARTS[format] // max(1, scales.shape[1])
    problem = Problem(
        *x.shape[:1],
        E=codes.shape[0],
        out=codes.shape[1],
        width=x.shape[1],
        dtype=x.dtype.name,
        format=format,
        group=group,
        zeros=zeros is not None,
        scale_dtype="float32" if scales is None else scales.dtype.name,
        storage=codes.dtype.name,
    )
    arrays = {"x": x, "codes": codes, "scales": scales, "zeros": zeros, "group_sizes": group_sizes}
    for (name, array), expected in zip(arrays.items(), problem.inputs(), strict=True):
        if _described(array) != _described(expected):
            raise ValueError(f"{format}: {name} should be {_described(expected)}, got {_described(array)}")
    return dispatch.run("moe_matmul", problem, target, *arrays.values())


def _described(array: jax.Array | jax.ShapeDtypeStruct | None) -> str:
    return "None" if array is None else f"{array.dtype.name}{list(array.shape)}"
