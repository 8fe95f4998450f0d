"""What some matmuls need of their activations beforehand."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quant_matmul.problem import Problem


def quantise_tokens(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes i8[T, in], ``x * (127 / max|x|)`` rounded to nearest even, and scales f32[T], ``max|x| / 127``. A token
    whose values are too small for f32 to have 127 / max|x| counts as zero."""
    x_DTI, _, scales_T = digits(x, 1)
    return x_DTI[0], scales_T


def digits(x: jax.Array, count: int) -> tuple[jax.Array, tuple[float, ...], jax.Array]:
    """Each value of x[T, in] as so many digits: i8[count, T, in], the place values of the digits, and f32[T] that the
    sum of digits times place values is to be multiplied by. Digits go from -127 to 127, each is what is left rounded
    to nearest even, places count by 254: the last one is a 127 * 254^(count - 1) th of the token's largest value."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=1, initial=0)
    inverse = 127 / largest
    rest = x * jnp.where(jnp.isfinite(inverse), inverse, 0)[:, None]
    found = []
    for _ in range(count):
        found.append(jnp.round(rest))
        rest = (rest - found[-1]) * 254
    return jnp.stack(found).astype(jnp.int8), tuple(254.0**-i for i in range(count)), largest * jnp.float32(1 / 127)


def group_sums(problem: Problem, x: jax.Array) -> jax.Array:
    """f32[T, groups]: the sums of x over the inputs of each group of the weight."""
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, problem.padded - problem.width)))
    return jnp.sum(x.reshape(x.shape[0], problem.padded // problem.group, problem.group), axis=2)
