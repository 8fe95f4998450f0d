"""Packing and rounding of weights against the documented layouts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.quant_matmul import packing
from tests.kernels.properties import PROPERTY
from tests.kernels.quant_matmul.body import Kind, expanded, make_problem

COMPILED = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
QUANTISE = COMPILED(packing.quantise, static_argnums=(1, 2, 3, 4))
DEQUANTISE = COMPILED(packing.dequantise, static_argnums=(3, 4))
PACK = COMPILED(packing.pack, static_argnums=1)
UNPACK = COMPILED(packing.unpack, static_argnums=1)


def test_int4_puts_the_first_half_of_the_inputs_low_and_the_second_high():
    u = np.arange(16, dtype=np.uint8)[None]
    codes = np.asarray(PACK(u, "int4"))
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(codes, [[0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]])


def test_int2_puts_quarters_of_the_inputs_in_pairs_of_bits():
    u = np.array([[0, 1, 1, 2, 2, 3, 3, 0]], np.uint8)
    np.testing.assert_array_equal(PACK(u, "int2"), [[0b11100100, 0b00111001]])


@PROPERTY
@given(seed=st.integers(0, 2**32 - 1), format=st.sampled_from(["int4", "int2"]), columns=st.sampled_from([1, 5]))
def test_unpacking_undoes_packing(seed, format, columns):
    parts = {"int4": 2, "int2": 4}[format]
    u = np.random.default_rng(seed).integers(0, 2 ** (8 // parts), (3, columns * parts), np.uint8)
    np.testing.assert_array_equal(UNPACK(PACK(u, format), format), u)


def test_inputs_are_padded_to_whole_groups_in_each_part():
    def padded(kind: Kind, *widths: int) -> list[int]:
        return [make_problem(kind, 1, 1, width).padded for width in widths]

    assert padded(("int4", 32, False), 1, 64, 65, 128) == [64, 64, 128, 128]
    assert padded(("int2", 64, False), 1, 256, 257) == [256, 256, 512]
    assert padded(("int8", 0, False), 1, 257) == [1, 257]
    assert padded(("fp8", 128, False), 1, 257) == [128, 384]
    assert padded(("fp4", 32, False), 64, 65) == [64, 128]


@pytest.mark.parametrize(
    ("kind", "scale_dtype"),
    [
        (("int8", 0, False), "float32"),
        (("int4", 32, False), "float16"),
        (("int4", 64, True), "bfloat16"),
        (("int4", 128, True), "float16"),
        (("int2", 64, False), "float32"),
        (("int2", 32, True), "float16"),
        (("int8", 32, False), "float16"),
        (("int8", 64, True), "float32"),
    ],
)
def test_rounding_is_to_the_nearest_code(kind, scale_dtype):
    """|weight - dequantised| <= |scale| / 2, in groups of all kinds: one-sided, constant, zero, with an outlier."""
    rng = np.random.default_rng(3)
    weight = rng.normal(size=(9, 150)).astype(np.float32) * 0.02
    weight[1] = np.abs(weight[1])
    weight[2] = -np.abs(weight[2])
    weight[3] = 0
    weight[4] = 0.03
    weight[5, 7] = 3.0
    weight[6, 9] = -3.0
    format, group, zero_points = kind
    codes, scales, zeros = QUANTISE(weight, format, group or None, zero_points, scale_dtype)
    p = make_problem(kind, 0, 9, 150, scales=scale_dtype)
    assert [(a.shape, a.dtype) for a in (codes, scales)] == [(a.shape, a.dtype) for a in p.inputs()[1:3]]
    assert (zeros is not None) == zero_points
    exact = expanded(p, *(None if a is None else np.asarray(a) for a in (codes, scales, zeros)))
    np.testing.assert_allclose(DEQUANTISE(codes, scales, zeros, format, 150), exact, rtol=1e-6, atol=1e-7)
    scale = np.asarray(scales, np.float64)
    step = np.repeat(scale, group, axis=0).T[:, :150] if group else scale[:, None]
    assert np.all(np.abs(weight - exact) <= np.abs(step) * 0.5001)
    np.testing.assert_array_equal(exact[3], 0)


def test_fp8_rounds_as_the_format_does():
    weight = np.random.default_rng(0).normal(size=(5, 77)).astype(np.float32)
    codes, scales, _ = QUANTISE(weight, "fp8")
    scaled = weight / np.asarray(scales)[:, None]
    assert np.abs(scaled).max() <= 448.01
    error = np.abs(np.asarray(codes, np.float64) - scaled)
    spacing = np.maximum(2.0 ** (np.floor(np.log2(np.abs(scaled))) - 3), 2.0**-9)
    assert np.all(error <= spacing * 0.501)
    assert codes.dtype == ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize(
    ("kind", "scale_dtype"), [(("fp8", 128, False), "float32"), (("fp4", 32, False), "bfloat16")], ids=str
)
def test_floats_of_groups_are_the_nearest_that_there_are(kind, scale_dtype):
    format, group, _ = kind
    rng = np.random.default_rng(5)
    weight = (rng.normal(size=(7, 150)) * 0.02).astype(np.float32)
    weight[3, :32] = 0
    weight[4, 5] = 30.0
    codes, scales, zeros = QUANTISE(weight, format, group, False, scale_dtype)
    p = make_problem(kind, 0, 7, 150, scales=scale_dtype)
    assert zeros is None
    assert [(a.shape, a.dtype) for a in (codes, scales)] == [(a.shape, a.dtype) for a in p.inputs()[1:3]]
    exact = expanded(p, np.asarray(codes), np.asarray(scales), None)
    np.testing.assert_allclose(DEQUANTISE(codes, scales, None, format, 150), exact, rtol=1e-6)
    scale_by_input = np.repeat(np.asarray(scales, np.float64), group, axis=0).T[:, :150]
    largest = np.abs(np.pad(weight, ((0, 0), (0, p.padded - 150)))).reshape(7, -1, group).max(-1)
    np.testing.assert_allclose(np.asarray(scales.T, np.float64), largest / {"fp8": 448, "fp4": 6}[format], rtol=2**-8)
    type = {"fp8": ml_dtypes.float8_e4m3fn, "fp4": ml_dtypes.float4_e2m1fn}[format]
    values = np.arange(256 if format == "fp8" else 16, dtype=np.uint8).view(type).astype(np.float64)
    nearest = np.nanmin(np.abs(weight[..., None] - values * scale_by_input[..., None]), axis=-1)
    np.testing.assert_allclose(np.abs(weight - exact), nearest, rtol=1e-4, atol=1e-9)


def test_ties_go_to_the_even_code():
    """As in the type that has these values."""
    weight = np.array([[0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5, 6, -0.25, 0.75]], np.float32)
    codes, scales, _ = QUANTISE(weight, "fp4", 32)
    np.testing.assert_array_equal(np.asarray(scales), [[1], [0]])
    right = weight.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(DEQUANTISE(codes, scales, None, "fp4", 10), right)
    np.testing.assert_array_equal(np.abs(right), [[0, 1, 1, 2, 2, 4, 4, 6, 0, 1]])


def test_negative_scales_use_the_wider_side_of_the_codes():
    """Symmetric codes go from -8 to 7: weights up to 8 fit with a scale of -1, exactly."""
    weight = np.tile(np.arange(-7, 9, dtype=np.float32), (1, 4))
    codes, scales, zeros = QUANTISE(weight, "int4", 32)
    np.testing.assert_array_equal(scales, np.full((2, 1), -1))
    np.testing.assert_array_equal(DEQUANTISE(codes, scales, zeros, "int4", 64), weight)


def test_values_too_small_for_the_scale_are_zero():
    weight = np.full((5, 77), 1e-41, np.float32)
    for kind in (("int8", 0, False), ("fp8", 0, False), ("int4", 32, True)):
        codes, scales, zeros = QUANTISE(weight, kind[0], kind[1] or None, kind[2])
        exact = expanded(
            make_problem(kind, 0, 5, 77), *(None if a is None else np.asarray(a) for a in (codes, scales, zeros))
        )
        assert np.all(np.abs(exact) <= 1e-38)


def test_what_has_no_codes_is_refused():
    quantise = functools.partial(packing.quantise, jnp.ones((2, 64)))
    with pytest.raises(ValueError, match="no codes of format 'bf16'"):
        quantise("bf16")
    for format, group in (("int8", None), ("fp8", 32), ("fp4", 32)):
        with pytest.raises(ValueError, match=f"{format} weights .* no zero points"):
            quantise(format, group, True)
    with pytest.raises(ValueError, match="groups of"):
        quantise("int4")
    with pytest.raises(ValueError, match="groups of"):
        quantise("w8a8", 32)
