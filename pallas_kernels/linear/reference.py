"""Matmul with weights ``[out, in]`` in plain JAX: one dot, accumulated in f32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.problem import Problem


def run(problem: Problem, x: jax.Array, weight: jax.Array, bits: jax.Array | None) -> jax.Array:
    """See ``api.linear``."""
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
