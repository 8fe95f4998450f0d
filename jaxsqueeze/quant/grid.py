"""The values that a scheme's codes can stand for, apart from the choice among them.

A weight f32[out, in] is seen by groups here, f32[out, groups, size], padded with zeros as packing.py pads; one group
where the scheme has one scale for each output. Codes are f32: integers, or of fp8 the values of e4m3; a weight is
``(code - zero) * scale``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsqueeze.quant.scheme import Scheme
from pallas_kernels.quant_matmul import packing
from pallas_kernels.quant_matmul.problem import PARTS, Problem

_CODES = {"int8": (-127, 127, 0), "fp8": (-448, 448, 0), "int4": (0, 15, 8), "int2": (0, 3, 2)}  # first, last, zero


class Grid(NamedTuple):
    """f32[out, groups] both, already rounded to the type that they are stored in."""

    scales: jax.Array
    zeros: jax.Array


def _codes(scheme: Scheme) -> tuple[int, int, int]:
    return (-128, 127, 0) if scheme.format == "int8" and scheme.zeros else _CODES[scheme.format]


def grouped(x: jax.Array, scheme: Scheme) -> jax.Array:
    """[..., groups, size] of x [..., in]."""
    width = x.shape[-1]
    padded = Problem(0, 1, width, "float32", scheme.format, scheme.group, scheme.zeros, scheme.scale_dtype).padded
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padded - width)])
    return x.reshape(*x.shape[:-1], -1, scheme.group or width)


def covering(low: jax.Array, high: jax.Array, scheme: Scheme) -> Grid:
    """The finest grid from ``low`` to ``high``, f32[out, groups]; 0 is in it. Of a group's extremes, this is the grid
    that packing.quantise takes."""
    first, last, zero = _codes(scheme)
    low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
    if scheme.zeros:
        scale = _stored(((high - low) / (last - first)), scheme)
        return Grid(scale, _stored(jnp.clip(first - low * _inverse(scale), first, last), scheme))
    # Codes may reach further on one side of zero than on the other: a negative scale turns that to the wider side.
    positive = jnp.maximum(high / (last - zero), -low / (zero - first))
    negative = jnp.maximum(-low / (last - zero), high / (zero - first))
    scale = _stored(jnp.where(negative < positive, -negative, positive), scheme)
    return Grid(scale, jnp.full_like(scale, zero))


def encode(value: jax.Array, grid: Grid, scheme: Scheme) -> jax.Array:
    """The nearest codes; the grid's arrays broadcast against ``value``."""
    first, last, _ = _codes(scheme)
    code = jnp.clip(value * _inverse(grid.scales) + grid.zeros, first, last)
    return code.astype(jnp.float8_e4m3fn).astype(jnp.float32) if scheme.format == "fp8" else jnp.round(code)


def decode(code: jax.Array, grid: Grid) -> jax.Array:
    return (code - grid.zeros) * grid.scales


def nearest(weight: jax.Array, grid: Grid, scheme: Scheme) -> jax.Array:
    """Codes [out, groups, size] of ``weight`` of that shape, each by itself."""
    return encode(weight, Grid(*(x[..., None] for x in grid)), scheme)


def rounded(weight: jax.Array, grid: Grid, scheme: Scheme) -> jax.Array:
    """What the nearest codes of ``weight`` [out, groups, size] stand for."""
    each = Grid(*(x[..., None] for x in grid))
    return decode(encode(weight, each, scheme), each)


def stored(codes: jax.Array, grid: Grid, scheme: Scheme) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(codes, scales, zeros) as packing.py lays them out, of codes [out, groups, size]."""
    codes = codes.reshape(codes.shape[0], -1)
    dtype = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}.get(scheme.format)
    codes = packing.pack(codes, scheme.format) if scheme.format in PARTS else codes.astype(dtype)
    if not scheme.group:
        return codes, grid.scales[:, 0], None
    scales, zeros = (x.T.astype(jnp.dtype(scheme.scale_dtype)) for x in grid)
    return codes, scales, zeros if scheme.zeros else None


def _stored(x: jax.Array, scheme: Scheme) -> jax.Array:
    return x.astype(jnp.dtype(scheme.scale_dtype)).astype(jnp.float32)


def _inverse(scale: jax.Array) -> jax.Array:
    """1 / scale, and 0 where that is not finite, as packing.py has it."""
    inverse = 1 / scale
    return jnp.where(jnp.isfinite(inverse), inverse, 0)
