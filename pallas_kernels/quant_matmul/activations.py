"""What some matmuls need of their activations beforehand."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quant_matmul.problem import Problem


def quantise_tokens(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes i8[T, in], ``x * (127 / max|x|)`` rounded to nearest even, and scales f32[T], ``max|x| / 127``. A token
    whose values are too small for f32 to have 127 / max|x| counts as zero."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=1, initial=0)
    inverse = 127 / largest
    codes = jnp.round(x * jnp.where(jnp.isfinite(inverse), inverse, 0)[:, None])
    return codes.astype(jnp.int8), largest * jnp.float32(1 / 127)


def group_sums(problem: Problem, x: jax.Array) -> jax.Array:
    """f32[T, groups]: the sums of x over the inputs of each group of the weight."""
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, problem.padded - problem.width)))
    return jnp.sum(x.reshape(x.shape[0], problem.padded // problem.group, problem.group), axis=2)
