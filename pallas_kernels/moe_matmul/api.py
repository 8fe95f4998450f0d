"""Matmul of rows with the weights of their experts, which may be quantised."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32, Num

from pallas_kernels import arguments, dispatch
from pallas_kernels.moe_matmul.problem import Problem
from pallas_kernels.quant_matmul.problem import Format
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
    problem = Problem.of(x, codes, scales, zeros, format, E=codes.shape[0])
    arrays = {"x": x, "codes": codes, "scales": scales, "zeros": zeros, "group_sizes": group_sizes}
    arguments.check(format, arrays, problem.inputs())
    return dispatch.run("moe_matmul", problem, target, *arrays.values())
