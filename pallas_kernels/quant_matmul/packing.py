"""The layouts of quantised weights, in one place: packing codes into bytes, quantising, and back.

Weights are f32[out, in]. Formats with one scale for each output, ``scales f32[out]``, weight = code * scale:

    int8, w8a8   codes i8[out, in]
    fp8          codes float8_e4m3fn[out, in]

Formats with one scale for each group of inputs and each output, ``scales [groups, out]``, weight = (u - zero) * scale;
``zeros`` are like ``scales`` and may be fractions, without them zero is half the range (8 or 2):

    int4   codes u8[out, padded / 2]: byte j has input j in its low nibble and input j + padded / 2 in its high one
    int2   codes u8[out, padded / 4]: byte j has input j + i * padded / 4 in its bits 2i and 2i + 1

``padded``: the inputs rounded up so that each part (half, quarter) is whole groups. Parts, and not neighbours, share a
byte, so that a byte's codes meet contiguous pieces of x. All functions are jit-able; they run once, at load.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quant_matmul.problem import PARTS, Format, Problem


def pack(u: jax.Array, format: Format) -> jax.Array:
    """Bytes [..., padded / parts] of codes ``u`` [..., padded] without sign."""
    bits = 8 // PARTS[format]
    codes = jnp.zeros((), jnp.uint8)
    for i, part in enumerate(jnp.split(u.astype(jnp.uint8), PARTS[format], axis=-1)):
        codes = codes | part << (bits * i)
    return codes


def unpack(codes: jax.Array, format: Format) -> jax.Array:
    """u8[..., padded] of bytes [..., padded / parts]."""
    bits = 8 // PARTS[format]
    parts = [codes >> (bits * i) & (2**bits - 1) for i in range(PARTS[format])]
    return jnp.concatenate(parts, axis=-1)


def quantise(
    weight: jax.Array,
    format: Format,
    group: int | None = None,
    zero_points: bool = False,
    scale_dtype: jnp.dtype = jnp.float16,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(codes, scales, zeros) of ``weight`` f32[out, in], each code the one nearest to its weight.

    ``scale_dtype``: of group scales and zeros; codes are chosen for the scale as rounded to it. Raises ValueError for a
    format that has no codes, or whose scales are not per group where a group or zero points are asked for.
    """
    if format == "bf16" or (zero_points and format not in PARTS):
        raise ValueError(f"no codes of format {format!r} with zero_points={zero_points}")
    problem = Problem(0, *weight.shape, dtype="float32", format=format, group=group or 0, zeros=zero_points)
    weight = weight.astype(jnp.float32)
    if not problem.group:
        return *_per_output(weight, format), None
    weight = jnp.pad(weight, ((0, 0), (0, problem.padded - problem.width)))
    grouped = weight.reshape(weight.shape[0], -1, problem.group)
    low, high = jnp.min(grouped, axis=-1), jnp.max(grouped, axis=-1)
    top = 2 ** (8 // problem.parts) - 1
    if zero_points:  # the range always has 0 in it, so that a constant group has a scale
        low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
        scale = ((high - low) / top).astype(scale_dtype)
        zero = jnp.clip(-low * _inverse(scale), 0, top).astype(scale_dtype)
    else:  # codes reach one step further below zero than above: a negative scale turns that to the wider side
        half = (top + 1) // 2
        positive = jnp.maximum(high / (half - 1), -low / half)
        negative = jnp.maximum(-low / (half - 1), high / half)
        scale = jnp.where(negative < positive, -negative, positive).astype(scale_dtype)
        zero = jnp.full_like(scale, half)
    u = jnp.round(grouped * _inverse(scale)[..., None] + zero.astype(jnp.float32)[..., None])
    codes = pack(jnp.clip(u, 0, top).reshape(weight.shape), format)
    return codes, scale.T, zero.T if zero_points else None


def _per_output(weight: jax.Array, format: Format) -> tuple[jax.Array, jax.Array]:
    top = {"int8": 127, "w8a8": 127, "fp8": 448}[format]
    scale = jnp.max(jnp.abs(weight), axis=1) / top
    ratio = jnp.clip(weight * _inverse(scale)[:, None], -top, top)
    return (ratio.astype(jnp.float8_e4m3fn) if format == "fp8" else jnp.round(ratio).astype(jnp.int8)), scale


def _inverse(scale: jax.Array) -> jax.Array:
    """1 / scale in f32, and 0 where that is not finite: a group of weights that small is zero."""
    inverse = 1 / scale.astype(jnp.float32)
    return jnp.where(jnp.isfinite(inverse), inverse, 0)


def dequantise(
    codes: jax.Array, scales: jax.Array | None, zeros: jax.Array | None, format: Format, width: int
) -> jax.Array:
    """f32[out, width]: the weight that these stand for."""
    if format not in PARTS:
        weight = codes.astype(jnp.float32)
        return weight if scales is None else weight * scales[:, None]
    u = unpack(codes, format)
    u = u.reshape(u.shape[0], scales.shape[0], -1).astype(jnp.float32)
    zero = 2.0 ** (8 // PARTS[format] - 1) if zeros is None else zeros.T.astype(jnp.float32)[..., None]
    weight = (u - zero) * scales.T.astype(jnp.float32)[..., None]
    return weight.reshape(u.shape[0], -1)[:, :width]
