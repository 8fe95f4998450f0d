"""Filters in plain JAX: one threshold per row, found by bisection on the order-preserving integers of f32. Exact, 32
passes for each of top-k and top-p, no sort of the vocabulary, and no pass that no row asks for."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sample_topk.problem import Problem


def run(problem: Problem, x_BV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array, min_p_B: jax.Array) -> jax.Array:
    """See ``api.sample_topk``."""
    k_on, p_on, m_on = jnp.any(top_k_B < problem.V), jnp.any(top_p_B < 1), jnp.any(min_p_B > 0)
    off_B = jnp.full(problem.B, -jnp.inf)
    kth_B = lax.cond(k_on, lambda: _kth(x_BV, top_k_B), lambda: off_B)
    nucleus_B = lax.cond(p_on, lambda: _nucleus(x_BV, kth_B, top_p_B), lambda: off_B)
    floor_B = lax.cond(m_on, lambda: _floor(x_BV, min_p_B), lambda: off_B)
    threshold_B = jnp.maximum(jnp.maximum(kth_B, nucleus_B), floor_B)
    return jnp.where(x_BV >= threshold_B[:, None], x_BV, -jnp.inf)


def _kth(x_BV: jax.Array, top_k_B: jax.Array) -> jax.Array:
    """The top_k-th largest value."""
    return _largest(lambda t_B: jnp.sum(x_BV >= t_B[:, None], axis=-1) >= top_k_B, x_BV)


def _nucleus(x_BV: jax.Array, kth_B: jax.Array, top_p_B: jax.Array) -> jax.Array:
    """The largest threshold over which lies top_p of the mass over ``kth_B``."""
    weight_BV = jnp.exp(x_BV - jnp.max(x_BV, axis=-1, keepdims=True))

    def mass(t_B: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(x_BV >= t_B[:, None], weight_BV, 0.0), axis=-1)

    goal_B = top_p_B * mass(kth_B)
    nucleus_B = _largest(lambda t_B: mass(t_B) >= goal_B, x_BV)
    return jnp.where(top_p_B < 1, nucleus_B, -jnp.inf)


def _floor(x_BV: jax.Array, min_p_B: jax.Array) -> jax.Array:
    best_B = jnp.max(x_BV, axis=-1)
    return jnp.where(min_p_B > 0, best_B + jnp.minimum(jnp.log(min_p_B), 0.0), -jnp.inf)


def _largest(holds: Callable[[jax.Array], jax.Array], x_BV: jax.Array) -> jax.Array:
    """The largest threshold up to each row's best for which ``holds``, a predicate that falls with the threshold."""

    def bit(i: jax.Array, low_B: jax.Array) -> jax.Array:
        trial_B = low_B | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(_value(trial_B)), trial_B, low_B)

    low_B = lax.fori_loop(0, 32, bit, jnp.zeros(x_BV.shape[0], jnp.uint32))
    return jnp.minimum(_value(low_B), jnp.max(x_BV, axis=-1))


def _value(order: jax.Array) -> jax.Array:
    """The f32 of this place in their order, counted in u32; an infinity for the places of NaNs at both ends."""
    order = jnp.clip(order, jnp.uint32(0x007FFFFF), jnp.uint32(0xFF800000))
    bits = jnp.where(order >> 31 == 1, order ^ jnp.uint32(0x80000000), ~order)
    return lax.bitcast_convert_type(bits, jnp.float32)
