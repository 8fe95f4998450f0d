"""GPTQ (Frantar et al. 2022): codes that make up for the errors of those before them.

Inputs of a layer are correlated. So a weight's inputs are rounded one after another, and what one's rounding adds to
the outputs is taken off by the weights not yet rounded, in the least-squares sense of the inputs' second moments,
``H = sum x x^T``. Inputs with much energy go first (act-order). Scales and zero points are chosen beforehand for all
groups, in the weight's own order (static groups): so codes need no permutation when they are multiplied.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxsqueeze.quant import grid
from jaxsqueeze.quant.grid import Grid
from jaxsqueeze.quant.scheme import Scheme

DAMPING = 0.01  # of the mean of H's diagonal, added to it; more where that is not enough to invert H in f32
_BLOCK = 128  # inputs whose errors reach those after them in one matmul


@struct.dataclass
class Compensation:
    """How errors of one input are taken off by others. With inputs in the order that they are rounded in,
    ``H^-1 = U^T U``: row i of U, divided by its diagonal, says what an error of 1 in i asks of the inputs after it."""

    order: jax.Array  # i32[in]
    upper: jax.Array  # f32[in, in]: U

    @property
    def cost(self) -> jax.Array:
        """f32[in], in the weight's own order: what is left of the square of an input's error after all the others have
        made up for it."""
        return (1 / jnp.square(jnp.diagonal(self.upper)))[jnp.argsort(self.order)]

    def scaled(self, scales: jax.Array) -> Compensation:
        """For inputs that are divided by ``scales`` f32[in]."""
        return self.replace(upper=self.upper * scales[self.order])


@jax.jit
def compensation(moments: jax.Array) -> Compensation:
    """Of inputs with second moments H = f32[in, in]. One that was never seen makes up for nothing.

    With its inputs turned round, H = R R^T of an upper triangular R, and U is R's inverse: one Cholesky factorisation,
    and H is never inverted.
    """
    energy = jnp.mean(jnp.diagonal(moments))
    order = jnp.argsort(-jnp.diagonal(moments))
    moments = moments[order][:, order][::-1, ::-1]
    eye = jnp.eye(len(moments), dtype=moments.dtype)

    def factor(damping: jax.Array) -> jax.Array:
        return jnp.linalg.cholesky(moments + eye * jnp.where(energy > 0, damping * energy, 1.0))

    def fails(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return ~jnp.all(jnp.isfinite(state[1])) & (state[0] < 1)

    def again(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return 10 * state[0], factor(10 * state[0])

    start = jnp.float32(DAMPING)
    _, lower = lax.while_loop(fails, again, (start, factor(start)))
    return Compensation(order, lax.linalg.triangular_solve(lower, eye, left_side=True, lower=True)[::-1, ::-1])


@functools.partial(jax.jit, static_argnums=3)
def gptq(
    weight: jax.Array, by: Compensation, chosen: Grid, scheme: Scheme
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(codes, scales, zeros) as packing.py lays them out, of ``weight`` f32[out, in] on the grid ``chosen``."""
    shape = grid.grouped(weight, scheme).shape  # [out, groups, size]
    out, padded = shape[0], shape[1] * shape[2]
    width = padded + -padded % _BLOCK
    more = jnp.arange(weight.shape[1], width)  # inputs that only fill a group or a block
    order = jnp.concatenate([by.order, more])
    upper = jax.scipy.linalg.block_diag(by.upper, jnp.eye(len(more)))
    w_IO = jnp.pad(weight.T, ((0, len(more)), (0, 0)))[order]  # an input's weights side by side
    group = jnp.minimum(order // shape[2], shape[1] - 1)
    scales, zeros = (x.T for x in chosen)

    def block(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        w_IO, codes_IO = carry
        at = i * _BLOCK
        rows = lax.dynamic_slice_in_dim(upper, at, _BLOCK)
        inner = lax.dynamic_slice_in_dim(rows, at, _BLOCK, axis=1)

        def one(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            part, codes, errors = carry
            own = Grid(scales[group[at + j]], zeros[group[at + j]])
            code = grid.encode(part[j], own, scheme)
            error = (part[j] - grid.decode(code, own)) / inner[j, j]
            later = jnp.where(jnp.arange(_BLOCK) > j, inner[j], 0.0)
            return part - later[:, None] * error, codes.at[j].set(code), errors.at[j].set(error)

        none = jnp.zeros((_BLOCK, out), jnp.float32)
        _, found, errors = lax.fori_loop(0, _BLOCK, one, (lax.dynamic_slice_in_dim(w_IO, at, _BLOCK), none, none))
        after = jnp.where(jnp.arange(width) >= at + _BLOCK, rows, 0.0)
        return w_IO - after.T @ errors, lax.dynamic_update_slice_in_dim(codes_IO, found, at, axis=0)

    _, codes_IO = lax.fori_loop(0, width // _BLOCK, block, (w_IO, jnp.zeros_like(w_IO)))
    return grid.stored(codes_IO[jnp.argsort(order)][:padded].T.reshape(shape), chosen, scheme)
