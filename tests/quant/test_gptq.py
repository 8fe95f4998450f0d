"""GPTQ against its definition in float64, one input after another, and against rounding to nearest."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxsqueeze.quant import grid
from jaxsqueeze.quant.gptq import DAMPING, compensation, gptq
from jaxsqueeze.quant.scheme import Scheme
from pallas_kernels.quant_matmul import packing
from tests.quant.build_layer import SCHEMES, assert_nearest, dequantised, inputs, output_error, weights


def whole(weight: np.ndarray, scheme: Scheme) -> grid.Grid:
    rows = grid.grouped(jnp.asarray(weight), scheme)
    return grid.covering(rows.min(-1), rows.max(-1), scheme)


def calibrated(weight: np.ndarray, moments: np.ndarray, scheme: Scheme) -> np.ndarray:
    by = compensation(jnp.asarray(moments, jnp.float32))
    return dequantised(gptq(jnp.asarray(weight), by, whole(weight, scheme), scheme), scheme, weight.shape[1])


def by_definition(weight: np.ndarray, moments: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """(f64[out, in], distance of each value to the next tie, in codes). Each input in turn is rounded, and those left
    are moved to where the outputs change least: found by solving for them anew, without blocks or Cholesky factors."""
    first, last = {"int8": (-127, 127), "fp8": (-448, 448), "int4": (0, 15), "int2": (0, 3)}[scheme.format]
    w = weight.astype(np.float64)
    size = scheme.group or w.shape[1]
    scale, zero = (np.repeat(np.asarray(x, np.float64), size, axis=1) for x in whole(weight, scheme))
    h = moments + DAMPING * np.diag(moments).mean() * np.eye(len(moments))
    order = np.argsort(-np.diag(moments), kind="stable")
    out, margin = np.zeros_like(w), np.ones_like(w)
    for i, j in enumerate(order):
        code = np.clip(w[:, j] / scale[:, j] + zero[:, j], first, last)
        if scheme.format == "fp8":
            code = code.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        else:
            margin[:, j] = np.abs(np.abs(code - np.floor(code)) - 0.5)
            code = np.round(code)
        out[:, j] = (code - zero[:, j]) * scale[:, j]
        rest = order[i + 1 :]
        if len(rest):
            moved = np.linalg.solve(h[np.ix_(rest, rest)], h[rest, j])
            w[:, rest] += moved[:, None].T * (w[:, j] - out[:, j])[:, None]
    return out, margin


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_equals_the_definition(scheme):
    """Two blocks, the last group not full. Outputs (rows) are independent: all agree but for a few in which a value
    falls on a tie, after which all that follows in it may differ."""
    x, weight = inputs(150), weights(40, 150)
    found = calibrated(weight, x.T @ x, scheme)
    right, margin = by_definition(weight, x.T @ x, scheme)
    differs = np.any(np.abs(found - right) > 1e-5, axis=1)
    tie = np.any(margin < 1e-3, axis=1)
    assert np.mean(differs) < 0.5
    if scheme.format != "fp8":
        assert not np.any(differs & ~tie)
    assert output_error(found, weight, x) == pytest.approx(output_error(right, weight, x), rel=0.02)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_better_than_the_nearest_codes(scheme):
    x, weight = inputs(300, 1000), weights(24, 300)
    by = compensation(jnp.asarray(x.T @ x, jnp.float32))
    arrays = gptq(jnp.asarray(weight), by, whole(weight, scheme), scheme)
    dtype = jnp.dtype(scheme.scale_dtype)
    nearest = packing.quantise(jnp.asarray(weight), scheme.format, scheme.group, scheme.zeros, dtype)
    for a, b in zip(arrays, nearest, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.shape, a.dtype) == (b.shape, b.dtype)
    error = [output_error(dequantised(a, scheme, 300), weight, x) for a in (arrays, nearest)]
    assert error[0] < 0.7 * error[1]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("moments", [np.diag(np.linspace(1, 9, 70)), np.zeros((70, 70))], ids=["alone", "unseen"])
def test_inputs_that_tell_nothing_of_each_other_get_the_nearest_codes(scheme, moments):
    weight = weights(8, 70)
    weight[3] = 0
    by = compensation(jnp.asarray(moments, jnp.float32))
    found = gptq(jnp.asarray(weight), by, whole(weight, scheme), scheme)
    assert_nearest(found, weight, scheme)
    assert not np.any(dequantised(found, scheme, 70)[3])


def test_an_input_never_seen_changes_nothing_else():
    x, weight = inputs(96), weights(8, 96)
    other = weight.copy()
    other[:, 1] = -0.5 * weight[:, 1]  # x[1] is always 0; within the range of its group
    found = [calibrated(w, x.T @ x, Scheme("int4", 32, scale_dtype="float32")) for w in (weight, other)]
    rest = np.arange(96) != 1
    same = np.all(np.sign(weight[:, :32].max(1)) == np.sign(other[:, :32].max(1)))
    assert same
    np.testing.assert_array_equal(found[0][:, 32:], found[1][:, 32:])
    assert np.mean(found[0][:, rest] != found[1][:, rest]) < 0.1


def test_moments_that_are_not_quite_positive_are_damped_more():
    """Sums in f32 may have slightly negative eigenvalues; here far more than the damping makes up for."""
    x = inputs(64)
    h = x.T @ x
    value, vector = np.linalg.eigh(h)
    value[0] = -0.05 * np.diag(h).mean()
    weight = weights(4, 64)
    found = calibrated(weight, (vector * value) @ vector.T, Scheme("int8"))
    assert np.all(np.isfinite(found))
    assert np.abs(found - weight).max() < 1


@pytest.mark.parametrize("scaled", [np.ones(60), np.geomspace(0.2, 5, 60)], ids=["as given", "scaled"])
def test_cost_is_what_is_left_of_an_error(scaled):
    """The Schur complement of H with respect to the inputs not yet rounded, by numpy."""
    x = inputs(60)
    h = x.T @ x + 1e-2 * np.mean(x**2) * len(x) * np.eye(60)
    h /= np.outer(scaled, scaled)
    cost = compensation(jnp.asarray(x.T @ x, jnp.float32)).scaled(jnp.asarray(scaled, jnp.float32)).cost
    order = np.argsort(-np.diag(x.T @ x), kind="stable")
    for i in (0, 7, 59):
        j, rest = order[i], order[i + 1 :]
        left = h[j, j] - h[j, rest] @ np.linalg.solve(h[np.ix_(rest, rest)], h[rest, j])
        assert cost[j] == pytest.approx(left, rel=2e-3)
