"""Quantised matmuls, each implementation against sums in float64 over weights expanded code by code."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.quant_matmul import integers, packing, reference
from pallas_kernels.quant_matmul import triton as triton_kernel
from pallas_kernels.quant_matmul.activations import digits
from pallas_kernels.quant_matmul.api import quant_matmul
from pallas_kernels.quant_matmul.problem import Problem
from pallas_kernels.target import A100, CPU, H200
from tests.kernels.interpreter import interpret
from tests.kernels.quant_matmul.body import QuantMatmulBody, kinds_of, make_problem, random_weight

COMPILED = functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
REFERENCE = COMPILED(reference.run)
INTEGERS = COMPILED(lambda problem, *arrays: integers.run(problem, integers.tiles(problem, CPU)[0], None, *arrays))


class TestReference(QuantMatmulBody):
    share = 4

    def matmul(self, problem, *arrays):
        return REFERENCE(problem, *arrays)

    def bound(self, problem):
        """Of many tokens the weight of groups is rounded to x's type."""
        rounding = {"bfloat16": 2**-9, "float16": 2**-12, "float32": 0}[problem.dtype]
        return super().bound(problem) + (rounding if problem.group and problem.T > reference.PARTIALS else 0)


class TestIntegers(QuantMatmulBody):
    kinds = kinds_of("int8", "int4", "fp4", "int2")
    most = integers.MOST
    share = 6

    def matmul(self, problem, *arrays):
        return INTEGERS(problem, *arrays)

    def bound(self, problem):
        """Two digits of x, or three."""
        return super().bound(problem) if problem.dtype == "float32" else 2e-4


class TestTriton(QuantMatmulBody):
    share = 3
    tile = None

    def matmul(self, problem, *arrays):
        tile = self.tile or triton_kernel.tiles(problem, H200)[0]
        return triton_kernel.run(problem, tile, interpret, *arrays)


@pytest.mark.parametrize(
    ("kind", "tokens", "width"),
    [
        (("int8", 0, False), 1, 600),
        (("int4", 32, True), 1, 1100),
        (("int4", 128, True), 70, 260),
        (("int8", 32, True), 33, 200),
    ],
    ids=str,
)
def test_every_tile_and_split(kind, tokens, width):
    """Also splits of unequal work, or of none."""
    body, p = TestTriton(), make_problem(kind, tokens, 70, width)
    candidates = triton_kernel.tiles(p, H200)
    shapes = {(t["bt"], t["bn"], t["bk"], t["splits"]): t for t in candidates}
    splits = ({**candidates[0], "splits": n} for n in (3, 13) if tokens == 1)
    for body.tile in (*shapes.values(), *splits):
        body.check(p)


def test_programs_fill_the_device_and_partial_sums_stay_few():
    def splits(*sizes, kind=("int4", 128, False), target=H200):
        return triton_kernel.tiles(make_problem(kind, *sizes), target)[0]["splits"]

    assert splits(1, 4096, 4096) > 1
    assert splits(1, 128256, 4096) == 1
    assert splits(1, 64, 128) == 1
    assert splits(2048, 4096, 4096) == 1
    assert splits(64, 1024, 4096) <= splits(1, 1024, 4096)


def test_tiles_fit_shared_memory():
    for kind in kinds_of("bf16", "int8", "int4", "int2"):
        for tokens in (1, 16, 64, 2048):
            for target in (H200, A100):
                p = make_problem(kind, tokens, 4096, 4096)
                for tile in triton_kernel.tiles(p, target):
                    x_bytes = tile["bk"] * tile["bt"] * 2 * p.parts
                    assert x_bytes + tile["bk"] * tile["bn"] * jnp.dtype(p.storage).itemsize <= target.shared_bytes
                    assert (p.padded // p.parts) % tile["bk"] == 0


def test_tuned_tiles_count_tokens_by_powers_of_two():
    keys = [make_problem(("int4", 64, True), tokens, 8, 64).key for tokens in (5, 7, 8, 9)]
    assert keys[0] == keys[1] == keys[2] != keys[3]
    assert keys[0] != make_problem(("int4", 64, False), 8, 8, 64).key
    assert keys[0] != make_problem(("int4", 32, True), 8, 8, 64).key


def test_digits_add_up():
    x = np.random.default_rng(0).normal(size=(5, 333)) * np.exp2(np.arange(5) * 20 - 60)[:, None]
    x = x.astype(np.float32)
    x_DTI, places, scales_T = jax.jit(digits, static_argnums=1)(x, 3)
    assert np.abs(x_DTI).max() <= 127
    rest = x.astype(np.float64) / np.asarray(scales_T, np.float64)[:, None]
    for digit, place in zip(x_DTI, places, strict=True):
        rest = rest - np.asarray(digit, np.float64) * np.float64(place)
        assert np.abs(rest).max() < 0.501 * place + 127 * 2**-22


def test_dispatch_takes_the_quickest_that_covers_the_case():
    few, many = (make_problem(("int4", 64, False), tokens, 8, 64) for tokens in (integers.MOST, integers.MOST + 1))
    assert "integers" in dispatch.explain("quant_matmul", few, CPU)
    assert "reference" in dispatch.explain("quant_matmul", many, CPU)
    assert "up to" in dispatch.explain("quant_matmul", many, CPU)
    assert "reference" in dispatch.explain("quant_matmul", make_problem(("fp8", 0, False), 1, 8, 64), CPU)
    assert "triton" in dispatch.explain("quant_matmul", few, A100)


@pytest.mark.parametrize("kind", [("int4", 32, True), ("int8", 32, False), ("fp8", 128, False)], ids=str)
def test_public_function(kind):
    """It tells the group from the arrays."""
    p = make_problem(kind, 3, 9, 100)
    x = np.random.default_rng(0).normal(size=(3, 100)).astype(np.float32)
    arrays = [None if a is None else jnp.asarray(a) for a in (x, *random_weight(p, np.random.default_rng(1)))]
    y = jax.jit(functools.partial(quant_matmul, format=p.format, target=CPU))(*arrays)
    right = x @ np.asarray(packing.dequantise(*arrays[1:], p.format, 100)).T
    np.testing.assert_allclose(y, right, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused():
    x, scales = np.ones((2, 100), np.float32), np.ones(7, np.float32)
    codes, packed = np.ones((7, 100), np.int8), np.ones((7, 64), np.uint8)
    grouped = np.ones((4, 7), np.float32)

    def multiply(*arrays, format):
        return quant_matmul(*arrays, format=format, target=CPU)

    with pytest.raises(ValueError, match="no format 'int5'"):
        multiply(x, codes, scales, format="int5")
    with pytest.raises(ValueError, match="scales should be float32"):
        multiply(x, codes, scales.astype(np.float16), format="int8")
    with pytest.raises(ValueError, match="scales should be float32"):
        multiply(x, codes, None, format="int8")
    with pytest.raises(ValueError, match=r"codes should be int8\[7, 99\]"):
        multiply(x[:, 1:], codes, scales, format="int8")
    with pytest.raises(ValueError, match="codes should be int8"):
        multiply(x, codes.astype(np.float32), scales, format="int8")
    with pytest.raises(ValueError, match=r"groups of \(32, 64, 128\), got 16"):
        multiply(x, packed, np.ones((8, 7), np.float32), format="int4")
    with pytest.raises(ValueError, match=r"zeros should be float32\[4, 7\]"):
        multiply(x, packed, grouped, grouped[:2], format="int4")
    with pytest.raises(ValueError, match="groups of"):
        multiply(x, packed, None, format="int4")
    with pytest.raises(ValueError, match=r"int8 weights have groups of \(0, 32, 64, 128\), got 50"):
        multiply(x, codes, grouped[:2], format="int8")
    with pytest.raises(ValueError, match="fp4 weights with groups of 32 have no zero points"):
        multiply(x, packed, grouped, grouped, format="fp4")
    with pytest.raises(ValueError, match=r"scales are .*, not uint8"):
        multiply(x, packed, grouped.astype(np.uint8), format="fp4")
    with pytest.raises(ValueError, match=r"groups of \(0,\), got 32"):
        Problem(2, 7, 100, "float32", "w8a8", 32)
