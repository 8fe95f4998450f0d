"""The layouts of quantised weights, in one place: packing codes into bytes, quantising, and back.

Weights are f32[out, in]. Formats with one scale for each output, ``scales f32[out]``, weight = code * scale:

    int8, w8a8   codes i8[out, in]
    fp8          codes float8_e4m3fn[out, in]

Formats with one scale for each group of inputs and each output, ``scales [groups, out]`` of float16, bfloat16 or
float32, weight = (code - zero) * scale; ``zeros`` are like ``scales`` and may be fractions:

    int8   codes i8[out, padded], without zeros zero is 0
    fp8    codes float8_e4m3fn[out, padded], no zeros
    int4   codes u8[out, padded / 2]: byte j has input j in its low nibble and input j + padded / 2 in its high one;
           without zeros zero is 8
    fp4    codes as int4's, each an e2m1 (OCP Microscaling Formats 1.0): bit 3 is the sign, bits 0 to 2 count
           0, 0.5, 1, 1.5, 2, 3, 4, 6; no zeros
    int2   codes u8[out, padded / 4]: byte j has input j + i * padded / 4 in its bits 2i and 2i + 1; without zeros
           zero is 2

``padded``: the inputs rounded up so that each part (whole, half, quarter) is whole groups. Parts, and not neighbours,
share a byte, so that a byte's codes meet contiguous pieces of x. All functions are jit-able; they run once, at load.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quant_matmul.problem import MIDDLE, PARTS, Format, Problem

_LARGEST = {"int8": 127, "w8a8": 127, "fp8": 448, "fp4": 6}  # value of a code, of formats as wide below 0 as above


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
    """(codes, scales, zeros) of ``weight`` f32[out, in], each code the one nearest to its weight, of two the even one.

    ``scale_dtype``: of group scales and zeros; codes are chosen for the scale as rounded to it. Raises ValueError for a
    format that has no codes, or not with this group or zero points.
    """
    if format == "bf16":
        raise ValueError(f"no codes of format {format!r}")
    problem = Problem(0, *weight.shape, dtype="float32", format=format, group=group or 0, zeros=zero_points)
    weight = weight.astype(jnp.float32)
    if not problem.group:
        scale = jnp.max(jnp.abs(weight), axis=1) / _LARGEST[format]
        return _nearest(weight * _inverse(scale)[:, None], format), scale, None
    weight = jnp.pad(weight, ((0, 0), (0, problem.padded - problem.width)))
    grouped = weight.reshape(weight.shape[0], -1, problem.group)
    if format in _LARGEST and not zero_points:
        scale = (jnp.max(jnp.abs(grouped), axis=-1) / _LARGEST[format]).astype(scale_dtype)
        codes = _nearest(grouped * _inverse(scale)[..., None], format).reshape(weight.shape)
        return pack(codes, format) if format in PARTS else codes, scale.T, None
    low, high = jnp.min(grouped, axis=-1), jnp.max(grouped, axis=-1)
    steps = 2 ** (8 // problem.parts) - 1
    bottom = -128 if format == "int8" else 0
    top = bottom + steps
    if zero_points:  # the range always has 0 in it, so that a constant group has a scale
        low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
        scale = ((high - low) / steps).astype(scale_dtype)
        zero = jnp.clip(bottom - low * _inverse(scale), bottom, top).astype(scale_dtype)
    else:  # codes reach one step further below zero than above: a negative scale turns that to the wider side
        half = MIDDLE[format]
        positive = jnp.maximum(high / (half - 1), -low / half)
        negative = jnp.maximum(-low / (half - 1), high / half)
        scale = jnp.where(negative < positive, -negative, positive).astype(scale_dtype)
        zero = jnp.full_like(scale, half)
    u = jnp.round(grouped * _inverse(scale)[..., None] + zero.astype(jnp.float32)[..., None])
    u = jnp.clip(u, bottom, top).reshape(weight.shape)
    return pack(u, format) if format in PARTS else u.astype(jnp.int8), scale.T, zero.T if zero_points else None


def _nearest(ratio: jax.Array, format: Format) -> jax.Array:
    """Codes, of fp4 unpacked, of values in the format's range or, by the rounding of a scale, just beyond it."""
    ratio = jnp.clip(ratio, -_LARGEST[format], _LARGEST[format])
    if format == "fp8":
        return ratio.astype(jnp.float8_e4m3fn)
    if format != "fp4":
        return jnp.round(ratio).astype(jnp.int8)
    size = jnp.abs(ratio)
    between = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # of code i and i + 1
    number = sum((size > limit if i % 2 == 0 else size >= limit).astype(jnp.uint8) for i, limit in enumerate(between))
    return number | (ratio < 0).astype(jnp.uint8) << 3


def _inverse(scale: jax.Array) -> jax.Array:
    """1 / scale in f32, and 0 where that is not finite: a group of weights that small is zero."""
    inverse = 1 / scale.astype(jnp.float32)
    return jnp.where(jnp.isfinite(inverse), inverse, 0)


def dequantise(
    codes: jax.Array, scales: jax.Array | None, zeros: jax.Array | None, format: Format, width: int
) -> jax.Array:
    """f32[out, width]: the weight that these stand for."""
    if scales is None or scales.ndim == 1:
        weight = codes.astype(jnp.float32)
        return weight if scales is None else weight * scales[:, None]
    u = unpack(codes, format) if format in PARTS else codes
    value = doubled_e2m1(u).astype(jnp.float32) / 2 if format == "fp4" else u.astype(jnp.float32)
    value = value.reshape(u.shape[0], scales.shape[0], -1)
    zero = MIDDLE.get(format, 0) if zeros is None else zeros.T.astype(jnp.float32)[..., None]
    weight = (value - zero) * scales.T.astype(jnp.float32)[..., None]
    return weight.reshape(u.shape[0], -1)[:, :width]


def doubled_e2m1(u: jax.Array) -> jax.Array:
    """i8: twice the values of e2m1 codes u8, 0 to 12 and their negatives."""
    number = (u & 7).astype(jnp.int8)
    double = number + jnp.maximum(number - 4, 0) + 2 * (number == 7).astype(jnp.int8)
    return jnp.where(u & 8 != 0, -double, double)
