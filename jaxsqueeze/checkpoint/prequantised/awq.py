"""AWQ checkpoints of AutoAWQ's "gemm" packing (Lin et al. 2023), int4 with zero points.

qweight  i32[in, out / 8]      codes along the outputs; a word's nibbles, lowest first, are outputs 0 2 4 6 1 3 5 7
qzeros   i32[groups, out / 8]  zero points, packed likewise
scales   [groups, out]         weight = (code - zero) * scale
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxsqueeze.checkpoint.prequantised.linear import SCALES, Linear, Prequantised, modules, setting, unpack
from jaxsqueeze.checkpoint.safetensors_files import SafetensorsFiles
from jaxsqueeze.checkpoint.source import SourceError
from jaxsqueeze.quant.codes import Codes, scheme_for

_NIBBLE_OF_OUTPUT = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
_PARTS = ("qweight", "qzeros", "scales")


def read(config: Mapping[str, Any], weights: SafetensorsFiles) -> Prequantised:
    bits = setting(config, "bits", int, 4)
    if bits != 4:
        raise SourceError(f"awq weights of {bits} bits are not supported (4 are); use another checkpoint")
    version = setting(config, "version", str, config.get("format") or "gemm").lower()
    if config.get("backend") == "llm-awq":
        version = "llm-awq"
    if version != "gemm":
        raise SourceError(f"the awq version {version!r} is not supported (gemm is); use another checkpoint")
    size = setting(config, "group_size", int, 128)
    names = frozenset(weights.names())
    linears = {f"{module}.weight": _linear(weights, module, size) for module in modules(names, "qweight")}
    hidden = {name for name in names if name.rsplit(".", 1)[-1] in _PARTS}
    return Prequantised("awq", linears, frozenset(hidden))


def _linear(weights: SafetensorsFiles, module: str, size: int) -> Linear:
    qweight, qzeros, scales = (f"{module}.{part}" for part in _PARTS)
    weights.require(qweight, ("I32",))
    width, words = weights.shape(qweight)
    out = words * 8
    group = size if size > 0 else width
    groups = math.ceil(width / group)
    weights.require(qzeros, ("I32",), (groups, words))
    weights.require(scales, SCALES, (groups, out))
    scheme = scheme_for("int4", group, width, zeros=True, scale_dtype=SCALES[weights.kind(scales)])

    def codes() -> Codes:
        factors = weights.read(scales).T
        zeros = _nibbles(weights.read(qzeros)).astype(factors.dtype)
        return Codes("int4", _nibbles(weights.read(qweight)), factors, zeros, group)

    return Linear((out, width), scheme, weights.where(qweight), codes)


def _nibbles(words: np.ndarray) -> np.ndarray:
    """u8[out, rows] of i32[rows, out / 8]."""
    nibbles = unpack(words, 4).reshape(len(words), -1, 8)[..., _NIBBLE_OF_OUTPUT]
    return np.ascontiguousarray(nibbles.reshape(len(words), -1).T)
