"""AWQ's scales and the clipped ranges: the grid of rounding to nearest as a start, less error in the outputs by each
step, before and after GPTQ."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsqueeze.quant import grid
from jaxsqueeze.quant.awq import FORMATS, input_scales
from jaxsqueeze.quant.clip import clip
from jaxsqueeze.quant.gptq import compensation, gptq
from jaxsqueeze.quant.scheme import Scheme
from tests.quant.build_layer import SCHEMES, assert_nearest, dequantised, inputs, output_error, weights

GROUPED = [scheme for scheme in SCHEMES if scheme.group]
SCALED = [scheme for scheme in SCHEMES if scheme.format in FORMATS]


def whole(weight, scheme: Scheme) -> grid.Grid:
    rows = grid.grouped(jnp.asarray(weight), scheme)
    return grid.covering(rows.min(-1), rows.max(-1), scheme)


def nearest(weight, chosen: grid.Grid, scheme: Scheme) -> np.ndarray:
    rows = grid.grouped(jnp.asarray(weight), scheme)
    return dequantised(grid.stored(grid.nearest(rows, chosen, scheme), chosen, scheme), scheme, weight.shape[1])


@pytest.mark.parametrize("scheme", [*SCHEMES, Scheme("int2", 64, scale_dtype="bfloat16")], ids=str)
def test_the_whole_range_is_the_grid_of_rounding_to_nearest(scheme):
    weight = weights(5, 100)
    weight[2], weight[3] = 0, np.abs(weight[3])
    rows = grid.grouped(jnp.asarray(weight), scheme)
    chosen = whole(weight, scheme)
    found = grid.stored(grid.nearest(rows, chosen, scheme), chosen, scheme)
    assert_nearest(found, weight, scheme)


@pytest.mark.parametrize("scheme", SCALED, ids=str)
def test_scales_of_inputs_lower_the_error(scheme):
    x, weight = inputs(150), weights(64, 150)
    h, magnitude = jnp.asarray(x.T @ x, jnp.float32), jnp.asarray(np.abs(x).mean(0), jnp.float32)
    s = np.asarray(input_scales(jnp.asarray(weight), jnp.diagonal(h), magnitude, scheme))
    assert np.all(np.isfinite(s))
    assert np.all(s > 0)
    assert np.log(s.max()) == pytest.approx(-np.log(s.min()), abs=1e-5)
    before, after = (nearest(weight * t, whole(weight * t, scheme), scheme) / t for t in (np.ones(150), s))
    errors = [output_error(w, weight, x) for w in (before, after)]
    assert errors[1] < (1.0 if scheme.format == "fp8" else 0.9) * errors[0]


def test_inputs_of_one_size_are_left_as_they_are():
    x = np.random.default_rng(0).normal(size=(500, 64))
    h, ones = jnp.asarray(x.T @ x, jnp.float32), jnp.ones(64)
    np.testing.assert_array_equal(input_scales(jnp.asarray(weights(8, 64)), jnp.diagonal(h), ones, SCHEMES[2]), 1)
    np.testing.assert_array_equal(input_scales(jnp.asarray(weights(8, 64)), 0 * ones, 0 * ones, SCHEMES[2]), 1)


@pytest.mark.parametrize("scheme", GROUPED, ids=str)
def test_narrower_ranges_lower_the_error(scheme):
    x, weight = inputs(150), weights(64, 150)
    h = jnp.asarray(x.T @ x, jnp.float32)
    chosen = clip(jnp.asarray(weight), jnp.diagonal(h), scheme)
    assert np.all(np.abs(chosen.scales) <= np.abs(whole(weight, scheme).scales) * 1.001)
    errors = [output_error(nearest(weight, g, scheme), weight, x) for g in (whole(weight, scheme), chosen)]
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("scheme", GROUPED, ids=str)
def test_each_step_lowers_the_error_that_gptq_leaves(scheme):
    x, weight = inputs(150, 2000), jnp.asarray(weights(64, 150))
    h, magnitude = jnp.asarray(x.T @ x, jnp.float32), jnp.asarray(np.abs(x).mean(0), jnp.float32)
    by = compensation(h)
    s = input_scales(weight, by.cost, magnitude, scheme)

    def error(s, clipped: bool) -> float:
        w, own = weight * s, by.scaled(s)
        chosen = clip(w, own.cost, scheme) if clipped else whole(w, scheme)
        found = dequantised(gptq(w, own, chosen, scheme), scheme, 150)
        return output_error(found / np.asarray(s), np.asarray(weight), x)

    plain, clipped, both = error(jnp.ones(150), False), error(jnp.ones(150), True), error(s, True)
    assert clipped < 0.95 * plain
    if scheme in SCALED:
        assert both <= 1.01 * clipped
    assert plain < 0.7 * output_error(nearest(np.asarray(weight), whole(weight, scheme), scheme), np.asarray(weight), x)
