"""What every implementation of moe_matmul has to do. Subclass and give ``matmul``."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.moe_matmul.problem import Problem
from pallas_kernels.quant_matmul import packing
from tests.kernels.properties import PROPERTY

# (format, group, zeros)
KINDS = [
    ("bf16", 0, False),
    ("int8", 0, False),
    ("fp8", 0, False),
    ("w8a8", 0, False),
    ("int4", 32, False),
    ("int4", 64, True),
    ("int2", 32, True),
    ("int8", 32, True),
    ("fp8", 128, False),
    ("fp4", 32, False),
]


def quantised(weight: np.ndarray, format: str, group: int, zeros: bool) -> tuple[list[np.ndarray | None], np.ndarray]:
    """Codes, scales and zeros of weights [E, out, in], and the weights that they stand for, f64[E, out, in]."""
    if format == "bf16":
        codes = jnp.asarray(weight, jnp.bfloat16)
        return [np.asarray(codes), None, None], np.asarray(codes, np.float64)
    arrays, exact = _quantise(weight, format, group, zeros)
    return [None if a is None else np.asarray(a) for a in arrays], np.asarray(exact, np.float64)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _quantise(
    weight: jax.Array, format: str, group: int, zeros: bool
) -> tuple[tuple[jax.Array | None, ...], jax.Array]:
    arrays = jax.vmap(lambda w: packing.quantise(w, format, group or None, zeros))(weight)
    return arrays, jax.vmap(lambda *a: packing.dequantise(*a, format, weight.shape[2]))(*arrays)


def by_row(problem: Problem, x: np.ndarray, weight: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    """f64[T, out], row by row. ``weight``: f64[E, out, in]."""
    y = np.zeros((problem.T, problem.out))
    for row, expert in enumerate(np.repeat(np.arange(problem.E), group_sizes)):
        values = x[row].astype(np.float32)
        if problem.format == "w8a8":  # by definition in f32: ties are as it rounds them
            largest = np.abs(values).max()
            values = np.round(values * (127 / largest)) * (np.float64(largest) / 127)
        y[row] = weight[expert] @ values.astype(np.float64)
    return y


class MoeMatmulBody:
    kinds = KINDS
    error_of_many_rows = 1e-3

    def matmul(self, problem: Problem, *arrays: jax.Array | None) -> jax.Array:
        raise NotImplementedError

    def check(
        self,
        group_sizes: list[int],
        kind: tuple[str, int, bool] = KINDS[1],
        spare: int = 0,
        out: int = 20,
        width: int = 96,
        dtype: str = "bfloat16",
        seed: int = 0,
        error: float = 1e-3,
    ) -> None:
        """``spare``: rows after the last group, NaN and one infinity."""
        format, group, zeros = kind
        rng = np.random.default_rng(seed)
        sizes = np.array(group_sizes, np.int32)
        x = np.asarray(rng.normal(size=(sizes.sum() + spare, width)) * np.exp(rng.normal()), dtype)
        x[sizes.sum() :] = np.nan
        x[sizes.sum() : sizes.sum() + 1] = np.inf
        weights = rng.normal(size=(len(sizes), out, width)).astype(np.float32)
        arrays, weight = quantised(weights, format, group, zeros)
        problem = Problem(
            len(x), out, width, dtype, format, group, zeros, *(a.dtype.name for a in arrays[1:2] if a is not None),
            E=len(sizes),
        )  # fmt: skip
        given = [None if a is None else jnp.asarray(a) for a in (x, *arrays, sizes)]
        y = np.asarray(self.matmul(problem, *given))
        right = by_row(problem, x, weight, sizes)
        assert y.dtype == np.float32
        assert y.shape == right.shape
        np.testing.assert_array_equal(y[sizes.sum() :], 0)
        assert np.isfinite(y).all()
        assert np.linalg.norm(y - right) <= error * np.linalg.norm(right)

    def test_formats(self):
        for kind in self.kinds:
            self.check([3, 0, 18, 1], kind, spare=2)

    @pytest.mark.parametrize("kind", [KINDS[3], KINDS[5]], ids=["w8a8", "int4"])
    def test_many_rows(self, kind):
        self.check([70, 3, 150], kind, spare=9, error=self.error_of_many_rows)

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_types_of_x(self, dtype):
        self.check([2, 5], dtype=dtype)

    @pytest.mark.parametrize(
        ("group_sizes", "spare"),
        [
            ([0, 0, 0], 5),
            ([0, 0, 0], 0),
            ([0, 37, 0], 0),
            ([1], 0),
            ([19], 3),
            ([1] * 9, 0),
            ([0] * 40 + [1] + [0] * 30 + [2], 1),
            ([16, 16, 17], 0),
        ],
        ids=lambda x: None if isinstance(x, int) else f"{len(x)} experts, {sum(x)} rows",
    )
    def test_routings(self, group_sizes, spare):
        self.check(group_sizes, spare=spare)

    @pytest.mark.parametrize(
        ("format", "out", "width"), [("int8", 1, 32), ("int8", 7, 33), ("int8", 65, 130), ("int4", 65, 33)]
    )
    def test_odd_sizes(self, format, out, width):
        self.check([2, 0, 4], {kind[0]: kind for kind in KINDS[:5]}[format], out=out, width=width)

    @PROPERTY
    @given(sizes=st.lists(st.integers(0, 20), min_size=4, max_size=4), seed=st.integers(0, 2**32 - 1))
    def test_any_routing_of_forty_rows(self, sizes, seed):
        while sum(sizes) > 40:
            sizes[int(np.argmax(sizes))] -= 1
        self.check(sizes, spare=40 - sum(sizes), seed=seed)
