"""Matmul with quantised weights."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Num

from pallas_kernels import dispatch
from pallas_kernels.quant_matmul.problem import PARTS, Format, Problem
from pallas_kernels.target import Target


def quant_matmul(
    x: Float[Array, "T in"],
    codes: Num[Array, "out bytes"],
    scales: Float[Array, " out"] | Float[Array, "groups out"] | None,
    zeros: Float[Array, "groups out"] | None = None,
    *,
    format: Format,
    target: Target,
) -> Float[Array, "T out"]:
    """``x @ weight.T`` in f32, accumulated in f32 and not rounded. The weight's layouts are in ``packing.py``.

    int8, fp8: the codes are multiplied as they are (each is exact in x's type), the scale comes after. w8a8: x is
    quantised too, each token by its largest value (``activations.quantise_tokens``), and the codes are multiplied in
    integers, exactly. int4, int2: the scale and zero point of a group are applied in f32. bf16: ``codes`` are
    the weight itself, of any float type, without scales. Raises ValueError for arrays that do not fit.
    """
    group = 0
    if format in PARTS and scales is not None:
        group = codes.shape[1] * PARTS[format] // max(1, scales.shape[0])
    problem = Problem(
        *x.shape[:1],
        out=codes.shape[0],
        width=x.shape[1],
        dtype=x.dtype.name,
        format=format,
        group=group,
        zeros=zeros is not None,
        scale_dtype="float32" if scales is None else scales.dtype.name,
        storage=codes.dtype.name,
    )
    arrays = x, codes, scales, zeros
    for name, array, expected in zip(("x", "codes", "scales", "zeros"), arrays, problem.inputs(), strict=True):
        if _described(array) != _described(expected):
            raise ValueError(f"{format}: {name} should be {_described(expected)}, got {_described(array)}")
    return dispatch.run("quant_matmul", problem, target, *arrays)


def _described(array: jax.Array | jax.ShapeDtypeStruct | None) -> str:
    return "None" if array is None else f"{array.dtype.name}{list(array.shape)}"
