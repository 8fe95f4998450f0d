"""AWQ (Lin et al. 2023): a scale for each input under which rounding the weight costs the outputs least.

A weight's column is multiplied by s and its input divided by it, which changes nothing until the weight is rounded:
then inputs of large activations are rounded relatively finer. ``s = magnitude^a``, for the ``a`` whose rounding costs
least, the square of an input's error counting as that input's ``cost`` says: no activations need to be kept.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxsqueeze.quant import grid
from jaxsqueeze.quant.scheme import Scheme

# Not int2: clipped and rounded by GPTQ it gained nothing, measured on SmolLM2-135M.
FORMATS = ("int8", "fp8", "int4")
EXPONENTS = 21  # from 0, which leaves the weight as it is, to 1


@functools.partial(jax.jit, static_argnums=3)
def input_scales(weight: jax.Array, cost: jax.Array, magnitude: jax.Array, scheme: Scheme) -> jax.Array:
    """f32[in] to multiply the inputs of ``weight`` f32[out, in] with. ``cost`` f32[in]; ``magnitude`` f32[in]: mean
    |x|; inputs of equal magnitude get equal scales."""

    def loss(exponent: jax.Array) -> jax.Array:
        s = _scales(magnitude, exponent)
        scaled = grid.grouped(weight * s, scheme)
        whole = grid.covering(jnp.min(scaled, axis=-1), jnp.max(scaled, axis=-1), scheme)
        error = grid.rounded(scaled, whole, scheme) - scaled
        return jnp.sum(jnp.square(error) * grid.grouped(cost / s**2, scheme))

    exponents = jnp.linspace(0, 1, EXPONENTS)
    return _scales(magnitude, exponents[jnp.argmin(lax.map(loss, exponents))])


def _scales(magnitude: jax.Array, exponent: jax.Array) -> jax.Array:
    """The largest and the smallest are each other's inverse. An input that was never seen counts as a middling one."""
    seen = magnitude > 0
    logarithm = jnp.log(jnp.where(seen, magnitude, 1.0))
    middle = jnp.sum(logarithm) / jnp.maximum(jnp.sum(seen), 1)
    logarithm = exponent * jnp.where(seen, logarithm, middle)
    return jnp.exp(logarithm - (jnp.max(logarithm) + jnp.min(logarithm)) / 2)
