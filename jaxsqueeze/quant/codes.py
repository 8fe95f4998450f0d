"""A weight that was quantised elsewhere, on its way into our layout: plain numpy arrays, nothing requantised.

weight[o, j] = (value(codes[o, j]) - zeros[o, g]) * scales[o, g], g the group of input j; without zeros, zero is half
the range of int4 and int2 codes (8, 2), and 0 of the others. ``value``: the code itself, of fp4 what its four bits
stand for in e2m1 (OCP Microscaling Formats 1.0, 2023).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np

from jaxsqueeze.quant.qtensor import QTensor, abstract
from jaxsqueeze.quant.scheme import Scheme
from pallas_kernels.quant_matmul import packing
from pallas_kernels.quant_matmul.problem import GROUPS, MIDDLE, PARTS, Format

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BLOCK = 1 << 22  # weights expanded at once: bounds the temporaries


@dataclasses.dataclass(frozen=True)
class Codes:
    """``codes`` [out, in]: u8 for int4, int2 and fp4, i8 for int8, float8_e4m3fn for fp8. ``scales`` and ``zeros``
    [out, groups] of one float type. ``group``: inputs that share a scale, the last group may be shorter.
    ``input_groups`` i32[in]: the group of each input, where that is not its number / ``group``."""

    format: Format
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    group: int
    input_groups: np.ndarray | None = None

    def rows(self, rearrange: Callable[[np.ndarray], np.ndarray]) -> Codes:
        """The same with its outputs rearranged by a function of arrays [out, ...]."""
        zeros = None if self.zeros is None else rearrange(self.zeros)
        return dataclasses.replace(self, codes=rearrange(self.codes), scales=rearrange(self.scales), zeros=zeros)

    def expand(self, dtype: np.dtype) -> np.ndarray:
        """The weight [out, in], computed in f32."""
        out = np.empty(self.codes.shape, dtype)
        group_of = self._group_of_inputs()
        step = max(1, _BLOCK // out.shape[1])
        for first in range(0, len(out), step):
            part = slice(first, first + step)
            codes = self.codes[part]
            value = _E2M1[codes] if self.format == "fp4" else codes.astype(np.float32)
            if self.zeros is not None:
                value -= self.zeros[part].astype(np.float32)[:, group_of]
            else:
                value -= np.float32(MIDDLE.get(self.format, 0))
            out[part] = value * self.scales[part].astype(np.float32)[:, group_of]
        return out

    def order(self) -> np.ndarray:
        """i32[in]: the inputs, group after group. ValueError if they do not fill their groups one after another."""
        group_of = self._group_of_inputs()
        order = np.argsort(group_of, kind="stable").astype(np.int32)
        if not np.array_equal(group_of[order], np.arange(order.size) // self.group):
            raise ValueError(f"its inputs do not fill groups of {self.group}")
        return order

    def pack(self, scheme: Scheme) -> QTensor:
        """In numpy arrays, laid out as ``scheme`` (see ``scheme_for``) asks. ValueError if the order of the inputs is
        not what the scheme says."""
        order = self.order()
        if not scheme.ordered and not np.array_equal(order, np.arange(order.size)):
            raise ValueError("its inputs have an order of their own although its settings say they have none")
        shape = self.codes.shape
        like = abstract(scheme, shape)
        codes = self.codes[:, order] if scheme.ordered else self.codes
        parts = PARTS.get(scheme.format, 1)
        codes = np.pad(codes, ((0, 0), (0, like.codes.shape[1] * parts - shape[1])))
        if parts > 1:
            codes = np.asarray(_pack(codes, scheme.format))
        scales, zeros = (None if a is None else self._spread(a, scheme) for a in (self.scales, self.zeros))
        return QTensor(codes, scales, zeros, scheme.format, shape, order if scheme.ordered else None)

    def _group_of_inputs(self) -> np.ndarray:
        return np.arange(self.codes.shape[1]) // self.group if self.input_groups is None else self.input_groups

    def _spread(self, values: np.ndarray, scheme: Scheme) -> np.ndarray:
        """Scales or zeros in the scheme's own (perhaps smaller) groups; 0 for groups of nothing but padding."""
        values = values.astype(scheme.scale_dtype)
        if not scheme.group:
            return values[:, 0].copy()
        like = abstract(scheme, self.codes.shape).scales
        filled = -(-self.codes.shape[1] // scheme.group)
        spread = np.zeros(like.shape, like.dtype)
        spread[:filled] = values.T[np.arange(filled) * scheme.group // self.group]
        return spread


def scheme_for(
    format: Format, group: int, width: int, *, zeros: bool, scale_dtype: str, ordered: bool = False
) -> Scheme | None:
    """The scheme that holds codes with such groups of ``width`` inputs exactly; None if there is none, for groups
    that are no multiple of ours."""
    if group >= width and not zeros and not PARTS.get(format):
        return Scheme(format)
    if group >= width:
        return Scheme(format, group if group in GROUPS else max(GROUPS), zeros, scale_dtype)
    ours = [size for size in GROUPS if group % size == 0]
    return Scheme(format, max(ours), zeros, scale_dtype, ordered) if ours else None


@functools.partial(jax.jit, static_argnums=1)
def _pack(codes: jax.Array, format: Format) -> jax.Array:
    return packing.pack(codes, format)
