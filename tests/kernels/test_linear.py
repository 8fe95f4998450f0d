"""The linear op in all its implementations against float64 sums."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear.api import linear
from pallas_kernels.target import CPU

LINEAR = jax.jit(functools.partial(linear, target=CPU))
RNG = np.random.default_rng(5)


def operands(rows: int, out: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array, np.ndarray]:
    """x and weights in bf16, the weights' bits, and the right result."""
    x = jnp.asarray(RNG.normal(size=(rows, size)), jnp.bfloat16)
    weight = jnp.asarray(RNG.normal(size=(out, size)) * np.exp(RNG.normal(size=(out, 1))), jnp.bfloat16)
    bits = jnp.asarray(np.asarray(weight).view(np.uint16))
    return x, weight, bits, np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("with_bits", [False, True])
@pytest.mark.parametrize(
    ("out", "size"), [(7, 32), (1, 64), (33, 576), (5, 2048), (6, 2080), (3, 4128), (9, 24), (4, 33)]
)
def test_equals_the_float64_sum(rows, with_bits, out, size):
    x, weight, bits, right = operands(rows, out, size)
    y = LINEAR(x, weight, bits if with_bits else None)
    assert y.dtype == jnp.float32
    assert y.shape == (rows, out)
    scale = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(weight, np.float64)).T
    assert np.max(np.abs(np.asarray(y) - right) / scale) < 1e-6


def test_one_row_reads_the_bits_and_no_other_case_does():
    """The bits of other weights betray which operand was read."""
    x, weight, _, right = operands(1, 4, 64)
    _, _, others, _ = operands(1, 4, 64)
    assert not np.allclose(LINEAR(x, weight, others), right, rtol=1e-2)
    np.testing.assert_allclose(LINEAR(jnp.concatenate([x, x]), weight, others)[:1], right, rtol=1e-4)


def test_special_values_stay_themselves():
    x = jnp.ones((1, 32), jnp.bfloat16)
    weight = jnp.zeros((4, 32), jnp.bfloat16).at[0, 3].set(jnp.nan).at[1, 5].set(jnp.inf).at[2, 7].set(-0.0)
    y = np.asarray(LINEAR(x, weight, jnp.asarray(np.asarray(weight).view(np.uint16))))[0]
    np.testing.assert_array_equal(y, [np.nan, np.inf, 0, 0])


def test_in_a_loop_the_weights_are_not_widened_beforehand():
    """XLA would hoist the widening out of a decode loop, and keep f32 weights for its whole length."""
    x, weight, bits, _ = operands(1, 512, 512)

    def loop(x, weight, bits):
        return jax.lax.fori_loop(0, 4, lambda i, x: jnp.tanh(LINEAR(x, weight, bits)), x)

    compiled = jax.jit(loop).lower(x.astype(jnp.float32), weight, bits).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 512 * 2


def test_sizes_that_differ_are_refused():
    x, weight, _, _ = operands(1, 4, 64)
    with pytest.raises(ValueError, match="does not fit"):
        linear(x[:, :32], weight, target=CPU)
    x, weight = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    for bits in (jnp.zeros((3, weight.shape[1]), jnp.uint16), jnp.zeros(weight.shape, jnp.uint8)):
        with pytest.raises(ValueError, match="are not those of weight"):
            linear(x, weight, bits, target=CPU)
