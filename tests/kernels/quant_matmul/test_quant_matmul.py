"""Quantised matmuls, each implementation against sums in float64 over weights expanded code by code."""

from __future__ import annotations

import pytest

from pallas_kernels.quant_matmul import integers, reference
from pallas_kernels.quant_matmul import triton as triton_kernel
from pallas_kernels.target import A100, CPU, H200
from tests.kernels.interpreter import interpret
from tests.kernels.quant_matmul.body import PER_GROUP, PER_OUTPUT, QuantMatmulBody, kinds_of, make_problem


class TestReference(QuantMatmulBody):
    def matmul(self, problem, *arrays):
        return reference.run(problem, *arrays)

    def bound(self, problem):
        """Of many tokens the weight is rounded to x's type."""
        rounded = problem.group and problem.T > reference.PARTIALS and problem.dtype == "bfloat16"
        return 4e-3 if rounded else 1e-3 if problem.group and problem.T > reference.PARTIALS else super().bound(problem)


class TestIntegers(QuantMatmulBody):
    kinds = kinds_of("int8", "int4", "int2")
    most = integers.MOST

    def matmul(self, problem, *arrays):
        (tile,) = integers.tiles(problem, CPU)
        return integers.run(problem, tile, None, *arrays)

    def bound(self, problem):
        return super().bound(problem) if problem.dtype == "float32" else 2e-4


class TestTriton(QuantMatmulBody):
    def matmul(self, problem, *arrays):
        return triton_kernel.run(problem, triton_kernel.tiles(problem, H200)[0], interpret, *arrays)


@pytest.mark.parametrize("kind", PER_OUTPUT + PER_GROUP, ids=str)
def test_every_tile_and_split(kind):
    """Also splits that are uneven or have nothing to do."""
    for tokens, width in ((1, 1100), (20, 300), (70, 260)):
        p = make_problem(kind, tokens, 70, width)
        candidates = triton_kernel.tiles(p, H200) + triton_kernel.tiles(p, A100)
        shapes = {(t["bt"], t["bn"], t["bk"], t["splits"]): t for t in candidates}
        splits = ({**candidates[0], "splits": n} for n in (3, 5))

        class Tiles(TestTriton):
            def __init__(self, tile):
                self.tile = tile

            def matmul(self, problem, *arrays):
                return triton_kernel.run(problem, self.tile, interpret, *arrays)

        for tile in (*shapes.values(), *(splits if tokens == 1 else ())):
            Tiles(tile).check(p)
