"""The range that a group's codes cover: narrower than its extremes where finer steps are worth more than they
(the clipping of AWQ, Lin et al. 2023).

Each group tries to cover shares of its smallest and of its largest weight, and keeps the pair whose rounding costs
least, the square of an input's error counting as that input's ``cost`` says.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsqueeze.quant import grid
from jaxsqueeze.quant.grid import Grid
from jaxsqueeze.quant.scheme import Scheme

# From the whole range on. Narrower ranges made int8 worse (SmolLM2-135M); of fp8 they have not been measured.
_SHARES = {"int4": np.linspace(1.0, 0.6, 6), "int2": np.linspace(1.0, 0.3, 8)}


@functools.partial(jax.jit, static_argnums=2)
def clip(weight: jax.Array, cost: jax.Array, scheme: Scheme) -> Grid:
    """The grid of ``weight`` f32[out, in]; ``cost`` f32[in]."""
    weight, cost = grid.grouped(weight, scheme), grid.grouped(cost, scheme)
    low, high = jnp.min(weight, axis=-1), jnp.max(weight, axis=-1)
    whole = grid.covering(low, high, scheme)
    if scheme.format not in _SHARES:
        return whole

    def attempt(best: tuple[jax.Array, Grid], pair: jax.Array) -> tuple[tuple[jax.Array, Grid], None]:
        found = grid.covering(low * pair[0], high * pair[1], scheme)
        loss = jnp.sum(jnp.square(grid.rounded(weight, found, scheme) - weight) * cost, axis=-1)
        better = loss < best[0]
        kept = (jnp.where(better, a, b) for a, b in zip(found, best[1], strict=True))
        return (jnp.where(better, loss, best[0]), Grid(*kept)), None

    shares = _SHARES[scheme.format]
    pairs = np.array(list(itertools.product(shares, shares)), np.float32)
    (_, found), _ = lax.scan(attempt, (jnp.full(low.shape, jnp.inf), whole), pairs)
    return found
