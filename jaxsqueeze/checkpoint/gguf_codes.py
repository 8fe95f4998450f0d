"""GGUF blocks that are our groups of 32: Q8_0, Q4_0 and Q4_1 as codes (layouts: ggml-common.h of llama.cpp).

    Q8_0  f16 d, 32 i8 codes         weight = d * code
    Q4_0  f16 d, 16 bytes            weight = d * (code - 8); byte j: input j in its low nibble, j + 16 in its high one
    Q4_1  f16 d, f16 m, 16 bytes     weight = d * code + m

Q8_0 and Q4_0 are kept to the bit. Q4_1 becomes (code - zero) * d with zero = -m / d in float32, whose rounding moves a
weight by less than 2^-22 of |m| + 15 |d|. Where d is 0, all weights of a block are m: code 1 with zero 0 and scale m.
"""

from __future__ import annotations

import gguf
import numpy as np

from jaxsqueeze.quant.codes import Codes
from jaxsqueeze.quant.scheme import Scheme

_Q = gguf.GGMLQuantizationType
BLOCK = 32
_KEPT = {_Q.Q8_0: ("int8", False, "float16"), _Q.Q4_0: ("int4", False, "float16"), _Q.Q4_1: ("int4", True, "float32")}


def scheme(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> Scheme | None:
    """How we can keep a tensor [out, in] of this type; None: expanded."""
    if kind not in _KEPT or len(shape) != 2:
        return None
    format, zeros, scale_dtype = _KEPT[kind]
    return Scheme(format, BLOCK, zeros, scale_dtype)


def codes(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> Codes:
    """Of the rows' bytes u8[out, in / 32 * block bytes]."""
    format, has_zeros, scale_dtype = _KEPT[kind]
    blocks = raw.reshape(len(raw), -1, gguf.GGML_QUANT_SIZES[kind][1])
    numbers = np.ascontiguousarray(blocks[..., : 4 if has_zeros else 2]).view("<f2")
    scales = numbers[..., 0].astype(scale_dtype)
    if kind == _Q.Q8_0:
        values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(len(raw), -1)
        return Codes(format, values, scales, None, BLOCK)
    data = blocks[..., -BLOCK // 2 :]
    values = np.concatenate((data & 15, data >> 4), axis=-1)
    zeros = None
    if has_zeros:
        low, flat = numbers[..., 1].astype(scale_dtype), scales == 0
        zeros = np.divide(-low, scales, out=np.zeros_like(low), where=~flat)
        scales = np.where(flat, low, scales)
        values[flat] = 1
    return Codes(format, values.reshape(len(raw), -1), scales, zeros, BLOCK)
