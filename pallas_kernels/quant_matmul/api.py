"""Matmul with quantised weights."""

from __future__ import annotations

from jaxtyping import Array, Float, Num

from pallas_kernels import arguments, dispatch
from pallas_kernels.quant_matmul.problem import Format, Problem
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

    The codes are multiplied as they are (each is exact in x's type), the scale comes after: of an output, or, with a
    zero point or without, of each group's sum, in f32. w8a8: x is quantised too, each token by its largest value
    (``activations.quantise_tokens``), and the codes are multiplied in integers, exactly. bf16: ``codes`` are the weight
    itself, of any float type, without scales. Raises ValueError for arrays that do not fit.
    """
    problem = Problem.of(x, codes, scales, zeros, format)
    arrays = {"x": x, "codes": codes, "scales": scales, "zeros": zeros}
    arguments.check(format, arrays, problem.inputs())
    return dispatch.run("quant_matmul", problem, target, *arrays.values())
