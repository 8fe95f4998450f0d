"""Grouped matmuls, each implementation against float64 products row by row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.moe_matmul import integers, reference
from pallas_kernels.moe_matmul import triton as triton_kernel
from pallas_kernels.moe_matmul.api import moe_matmul
from pallas_kernels.moe_matmul.problem import Problem
from pallas_kernels.target import CPU, H200
from tests.kernels.interpreter import interpret
from tests.kernels.moe_matmul.body import KINDS, MoeMatmulBody

# Compiled for speed of compiling; the arithmetic is the same.
COMPILED = functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
REFERENCE = COMPILED(reference.run)
INTEGERS = COMPILED(lambda problem, *arrays: integers.run(problem, integers.tiles(problem, CPU)[0], None, *arrays))


class TestReference(MoeMatmulBody):
    error_of_many_rows = 3e-3  # weights with group scales are rounded to bf16

    def matmul(self, problem, *arrays):
        return REFERENCE(problem, *arrays)


class TestIntegers(MoeMatmulBody):
    kinds = tuple(kind for kind in KINDS if kind[0] in ("int8", "int4", "fp4", "int2"))
    test_many_rows = None  # see test_integers_are_for_few_rows

    def matmul(self, problem, *arrays):
        return INTEGERS(problem, *arrays)


class TestTriton(MoeMatmulBody):
    """The default tile."""

    def matmul(self, problem, *arrays):
        return triton_kernel.run(problem, triton_kernel.tiles(problem, H200)[0], interpret, *arrays)


class TestTritonTiles(MoeMatmulBody):
    """Every candidate tile of rows enough for the largest."""

    # Of the body, what depends on tiles.
    test_formats = test_types_of_x = test_routings = test_odd_sizes = test_any_routing_of_forty_rows = None

    def matmul(self, problem, *arrays):
        tiles = triton_kernel.tiles(problem, H200)
        assert len({tile["bt"] for tile in tiles}) > 1
        results = [np.asarray(triton_kernel.run(problem, tile, interpret, *arrays)) for tile in tiles]
        for other in results[1:]:
            np.testing.assert_allclose(other, results[0], rtol=1e-3, atol=1e-3)
        return results[0]


def test_integers_are_for_few_rows():
    few, many = (Problem(rows, 8, 32, "bfloat16", "int8", E=4) for rows in (4 * 31, 4 * 32))
    assert "integers" in dispatch.explain("moe_matmul", few, CPU)
    with pytest.raises(NotImplementedError, match="up to 32 tokens"):
        integers.tiles(many, CPU)
    assert "reference" in dispatch.explain("moe_matmul", many, CPU)


def test_weights_of_others_do_not_show():
    problem = Problem(4, 8, 32, "float32", "int8", E=64)
    codes, sizes = np.ones((64, 8, 32), np.int8), np.zeros(64, np.int32)
    scales = np.full((64, 8), np.nan, np.float32)
    scales[5], sizes[5] = 1, 4
    y = REFERENCE(problem, jnp.ones((4, 32)), jnp.asarray(codes), jnp.asarray(scales), None, jnp.asarray(sizes))
    np.testing.assert_array_equal(y, 32)


@pytest.mark.parametrize(
    ("format", "group"), [("bf16", 0), ("fp8", 0), ("int8", 0), ("w8a8", 0), ("int4", 64), ("int8", 32)]
)
def test_on_cpu_no_weights_are_converted_but_those_of_routed_experts(format, group):
    """There is no room for all of them. (XLA:CPU would widen the whole stack before the loop.)"""
    problem = Problem(4, 64, 128, "bfloat16", format, group, scale_dtype="float16" if group else "float32", E=64)
    compiled = jax.jit(functools.partial(dispatch.run, "moe_matmul", problem, CPU)).lower(*problem.inputs()).compile()
    codes = problem.inputs()[1]
    assert compiled.memory_analysis().temp_size_in_bytes < codes.size * codes.dtype.itemsize / 2


def test_no_rows_no_experts_and_no_outputs():
    for T, E, out in ((0, 2, 3), (2, 0, 3), (2, 3, 0)):
        problem = Problem(T, out, 32, "float32", "int8", E=E)
        arrays = [None if a is None else jnp.zeros(a.shape, a.dtype) for a in problem.inputs()]
        for y in (
            REFERENCE(problem, *arrays),
            triton_kernel.run(problem, triton_kernel.tiles(problem, H200)[0], interpret, *arrays),
            moe_matmul(*arrays, format="int8", target=CPU),
        ):
            np.testing.assert_array_equal(y, np.zeros((T, out)))


def test_what_does_not_fit_is_refused():
    x, codes, scales, sizes = jnp.zeros((2, 32)), jnp.zeros((3, 5, 32), jnp.int8), jnp.ones((3, 5)), jnp.zeros(3, int)
    assert moe_matmul(x, codes, scales, None, sizes, format="int8", target=CPU).shape == (2, 5)
    with pytest.raises(ValueError, match="group_sizes should be"):
        moe_matmul(x, codes, scales, None, sizes[:2], format="int8", target=CPU)
    with pytest.raises(ValueError, match="scales should be"):
        moe_matmul(x, codes, scales[:2], None, sizes, format="int8", target=CPU)
    with pytest.raises(ValueError, match="codes should be"):
        moe_matmul(x[:, :31], codes, scales, None, sizes, format="int8", target=CPU)
    with pytest.raises(ValueError, match="no format"):
        moe_matmul(x, codes, scales, None, sizes, format="int9", target=CPU)
