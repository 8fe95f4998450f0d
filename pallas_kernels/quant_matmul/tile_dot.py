"""The inner loop of every matmul with quantised weights: one tile ``weight[n] @ x[rows].T`` over a range of codes.

The weight is the left operand, so that a few tokens fill an MMA's narrow side (8) and its codes go from shared memory
to registers, are decoded there, and are multiplied from there. Decoding converts no integer to a float:

    An unsigned code of up to 8 bits at the bottom of a bf16 (f16) is a subnormal number, u * 2^-133 (u * 2^-24). One
    fused multiply-add makes that (u - middle) * UNIT, exactly, with UNIT = 2^-6 (2^-9). A code that lies higher in its
    byte is not shifted down, its multiplier is smaller. UNIT leaves the sum with the scale.

    The bits of an e4m3, moved to where bf16 (f16) has its sign, exponent and mantissa, are the number but for the
    exponent's bias. Multiplied by 2^120 (2^8) they are it, subnormals too. (The two codes of NaN count as +-480.) So
    are those of an e2m1, multiplied by 2^126 (2^14).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_dot(
    x_ptr, row, row_ok, codes_ptr, scales_ptr, zeros_ptr, n, first, last,
    OUT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, sums_ptr=None,
):  # fmt: skip
    """f32[BN, BT]: outputs ``n`` (i64[BN]) of the rows ``row`` (i64[BT]) of x[., WIDTH], scaled; for w8a8 without the
    tokens' scales. Rows that are not ``row_ok`` count as zeros; every ``n`` must exist.

    codes[OUT, COLUMNS], scales and zeros as in ``packing.py``; pointers that the format does not have are not read.
    The columns of codes are those from ``first`` to ``last``, ``first`` a multiple of BK. With groups ``last`` is one
    too, and one of BK and GROUP divides the other.

    Zero points: without ``sums_ptr`` the tensor cores sum x, which costs many tokens more than it is worth; with
    ``sums_ptr``, f32[., groups] of each row of x (``activations.group_sums``), the tile whose ``first`` is 0 takes off
    what all zero points do.
    """
    if GROUP == 0:
        acc = _per_output(x_ptr, row, row_ok, codes_ptr, scales_ptr, n, first, last, WIDTH, FORMAT, BT, BN, BK)
    else:
        acc = _per_group(
            x_ptr, row, row_ok, codes_ptr, scales_ptr, zeros_ptr, n, first, last,
            OUT, WIDTH, COLUMNS, FORMAT, GROUP, ZEROS and sums_ptr is None, BT, BN, BK,
        )  # fmt: skip
        if ZEROS and sums_ptr is not None and first == 0:
            acc -= _zero_points(
                sums_ptr, row, row_ok, scales_ptr, zeros_ptr, n,
                OUT, COLUMNS // GROUP * (8 // bits(FORMAT)), middle(FORMAT), BT, BN,
            )  # fmt: skip
    return acc


@triton.jit
def _per_output(
    x_ptr, row, row_ok, codes_ptr, scales_ptr, n, first, last,
    WIDTH: tl.constexpr, FORMAT: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One scale for each output, applied at the end."""
    if FORMAT == "int8":
        codes_ptr = codes_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    k = tl.arange(0, BK)
    x_ptrs = x_ptr + row[None, :] * WIDTH + k[:, None]
    codes_ptrs = codes_ptr + n[:, None] * WIDTH + k[None, :]
    acc = tl.zeros((BN, BT), tl.int32 if FORMAT == "w8a8" else tl.float32)
    for j in range(first, last, BK):
        if WIDTH % BK == 0:
            x = tl.load(x_ptrs + j, mask=row_ok[None, :], other=0)
            codes = tl.load(codes_ptrs + j)
        else:
            x = tl.load(x_ptrs + j, mask=row_ok[None, :] & (j + k[:, None] < WIDTH), other=0)
            codes = tl.load(codes_ptrs + j, mask=j + k[None, :] < WIDTH, other=0)
        if FORMAT == "w8a8":
            acc = tl.dot(codes, x, acc, out_dtype=tl.int32)
        elif FORMAT != "bf16":
            acc = dot(decode(codes, FORMAT, 0, x.dtype), x, acc)
        elif x.dtype == codes.dtype or (codes.dtype == tl.bfloat16 and x.dtype == tl.float32):
            acc = dot(codes, x, acc)
        else:
            acc = tl.dot(codes.to(tl.float32), x.to(tl.float32), acc, input_precision="tf32x3")
    if FORMAT != "bf16":
        scale = tl.load(scales_ptr + n) / unit(FORMAT, x_ptr.dtype.element_ty)
        acc = acc.to(tl.float32) * scale[:, None]
    return acc


@triton.jit
def _per_group(
    x_ptr, row, row_ok, codes_ptr, scales_ptr, zeros_ptr, n, first, last,
    OUT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One scale for each group, applied to its f32 dot. A zero point takes ``(zero - middle) * sum(x)`` off that; a sum
    of the tensor cores is in the place where it is needed."""
    BITS: tl.constexpr = bits(FORMAT)
    STEP: tl.constexpr = min(GROUP, BK)
    UNIT: tl.constexpr = unit(FORMAT, x_ptr.dtype.element_ty)
    if FORMAT == "int8":
        codes_ptr = codes_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    k = tl.arange(0, STEP)
    x_ptrs = x_ptr + row[None, :] * WIDTH + k[:, None]
    codes_ptrs = codes_ptr + n[:, None] * COLUMNS + k[None, :]
    acc = tl.zeros((BN, BT), tl.float32)
    for j in range(first, last, BK):
        for column in tl.static_range(0, BK, STEP):
            codes = tl.load(codes_ptrs + (j + column))
            # Made of the codes, ones have the weights' layout: then one x in shared memory serves both dots.
            ones = decode(codes, FORMAT, 0, x_ptr.dtype.element_ty) * 0 + 1
            for part in tl.static_range(8 // BITS):
                at = part * COLUMNS + j + column
                mask = row_ok[None, :]
                if 8 // BITS * COLUMNS != WIDTH:
                    mask &= at + k[:, None] < WIDTH
                x = tl.load(x_ptrs + at, mask=mask, other=0)
                product = dot(decode(codes, FORMAT, part, x.dtype), x, tl.zeros((BN, BT), tl.float32))
                place = (at // GROUP).to(tl.int64) * OUT + n
                if ZEROS:
                    sums = dot(ones, x, tl.zeros((BN, BT), tl.float32))
                    zero = tl.load(zeros_ptr + place).to(tl.float32) - middle(FORMAT)
                    product -= (zero * UNIT)[:, None] * sums
                acc += product * tl.load(scales_ptr + place).to(tl.float32)[:, None]
    return acc / UNIT


@triton.jit
def _zero_points(
    sums_ptr, row, row_ok, scales_ptr, zeros_ptr, n,
    OUT: tl.constexpr, GROUPS: tl.constexpr, MIDDLE: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """f32[BN, BT]: ``(zero - MIDDLE) * scale`` times the sum of x, over all groups."""
    acc = tl.zeros((BN, BT), tl.float32)
    for first in range(0, GROUPS, 16):
        g = first + tl.arange(0, 16)
        place = g[None, :].to(tl.int64) * OUT + n[:, None]
        zero = tl.load(zeros_ptr + place, mask=g[None, :] < GROUPS, other=0).to(tl.float32) - MIDDLE
        scale = tl.load(scales_ptr + place, mask=g[None, :] < GROUPS, other=0).to(tl.float32)
        mask = row_ok[None, :] & (g[:, None] < GROUPS)
        sums = tl.load(sums_ptr + row[None, :] * GROUPS + g[:, None], mask=mask, other=0)
        acc = tl.dot(zero * scale, sums, acc, input_precision="tf32x3")
    return acc


@triton.jit
def dot(weight, x, acc):
    """``acc + weight @ x`` in f32. An x of f32 is the sum of three of bf16, each multiplied with the weight: so x stays
    exact, and the weight narrow."""
    if weight.dtype == tl.bfloat16 and x.dtype == tl.float32:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(weight, high, tl.dot(weight, middle, tl.dot(weight, low, acc)))
    else:
        acc = tl.dot(weight, x, acc, input_precision="tf32x3")
    return acc


@triton.jit
def decode(codes, FORMAT: tl.constexpr, PART: tl.constexpr, DTYPE: tl.constexpr):
    """The codes (uint8) of one part of the inputs as floats of type ``half(DTYPE)``: the value of an e4m3, e2m1 or
    int8, or the distance from the middle, times UNIT."""
    word = codes.to(tl.int16)
    if FORMAT == "fp8":
        word = (codes.to(tl.int8, bitcast=True).to(tl.int16) << exponent_place(DTYPE)) & sign_and_number(DTYPE)
    elif FORMAT == "fp4":
        number = (word << (exponent_place(DTYPE) + 2 - 4 * PART)) & (7 << (exponent_place(DTYPE) + 2))
        word = ((word << (12 - 4 * PART)) & -0x8000) | number
    elif FORMAT == "int8":
        word ^= 0x80  # two's complement to the distance from -128
    else:
        word &= (2 ** bits(FORMAT) - 1) << (bits(FORMAT) * PART)
    value = word.to(half(DTYPE), bitcast=True) * multiplier(FORMAT, PART, DTYPE)
    if FORMAT != "fp8" and FORMAT != "fp4":
        value -= 2 ** (bits(FORMAT) - 1) * unit(FORMAT, DTYPE)
    return value


@triton.constexpr_function
def bits(format):
    return {"int8": 8, "fp8": 8, "int4": 4, "fp4": 4, "int2": 2}[format]


@triton.constexpr_function
def middle(format):
    """The zero point of a weight that has none, as ``problem.MIDDLE``."""
    return {"int4": 8, "int2": 2}.get(format, 0)


@triton.constexpr_function
def half(dtype):
    """What codes are decoded to for x of ``dtype``."""
    return tl.float16 if dtype == tl.float16 else tl.bfloat16


@triton.constexpr_function
def unit(format, dtype):
    """What decoded codes are multiples of."""
    if format in ("fp8", "fp4", "w8a8"):
        return 1.0
    return 2.0**-9 if half(dtype) == tl.float16 else 2.0**-6


@triton.constexpr_function
def exponent_place(dtype):
    """How far left an e4m3's exponent and mantissa go; an e2m1's, two bits narrower in mantissa, two further."""
    return 7 if half(dtype) == tl.float16 else 4


@triton.constexpr_function
def sign_and_number(dtype):
    """The bits that are then its sign, exponent and mantissa: between them are copies of the sign."""
    return -0x4080 if half(dtype) == tl.float16 else -0x7810


@triton.constexpr_function
def multiplier(format, part, dtype):
    if format == "fp8":
        return 2.0**8 if half(dtype) == tl.float16 else 2.0**120
    if format == "fp4":
        return 2.0**14 if half(dtype) == tl.float16 else 2.0**126
    return 2.0 ** ((15 if half(dtype) == tl.float16 else 127) - bits(format) * part)
