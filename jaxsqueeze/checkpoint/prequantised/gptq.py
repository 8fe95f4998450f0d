"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them (Frantar et al. 2022).

    qweight  i32[in * bits / 32, out]      codes along the inputs, the first in a word's lowest bits
    qzeros   i32[groups, out * bits / 32]  zero points along the outputs
    scales   [groups, out]                 weight = (code - zero) * scale
    g_idx    i32[in]                       each input's group; with desc_act they are not one after another

The format "gptq" (v1) stores zero points minus one, and its readers add one without wrapping; "gptq_v2" stores them as
they are. ``sym``: every zero point is half the range. ``group_size`` -1: one group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxsqueeze.checkpoint.prequantised.linear import (
    SCALES,
    Linear,
    Prequantised,
    modules,
    setting,
    signed,
    unpack,
)
from jaxsqueeze.checkpoint.safetensors_files import SafetensorsFiles
from jaxsqueeze.checkpoint.source import SourceError
from jaxsqueeze.quant.codes import Codes, scheme_for

_FORMATS = {2: "int2", 4: "int4", 8: "int8"}
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


def read(config: Mapping[str, Any], weights: SafetensorsFiles) -> Prequantised:
    bits = setting(config, "bits", int)
    if bits not in _FORMATS:
        raise SourceError(f"gptq weights of {bits} bits are not supported (2, 4 and 8 are); use another checkpoint")
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if layout not in _ZERO_OFFSETS or config.get("is_marlin_format"):
        layout = "marlin" if config.get("is_marlin_format") else layout
        raise SourceError(f"the gptq format {layout!r} is not supported (gptq and gptq_v2 are); use another checkpoint")
    dynamic = setting(config, "dynamic", Mapping, {})
    if any(not rule.startswith("-:") for rule in dynamic):  # "-:" leaves modules out
        raise SourceError("gptq settings that differ by layer (dynamic) are not supported; use another checkpoint")
    names = frozenset(weights.names())
    linears = {
        f"{module}.weight": _linear(config, weights, module, bits, _ZERO_OFFSETS[layout])
        for module in modules(names, "qweight")
    }
    hidden = {name for name in names if name.rsplit(".", 1)[-1] in _PARTS}
    return Prequantised("gptq", linears, frozenset(hidden))


def _linear(config: Mapping[str, Any], weights: SafetensorsFiles, module: str, bits: int, offset: int) -> Linear:
    def name(part: str) -> str:
        return f"{module}.{part}"

    symmetric = setting(config, "sym", bool, True)
    weights.require(name("qweight"), ("I32",))
    rows, out = weights.shape(name("qweight"))
    width = rows * 32 // bits
    size = setting(config, "group_size", int, -1)
    group = size if size > 0 else width
    groups = math.ceil(width / group)
    weights.require(name("scales"), SCALES, (groups, out))
    weights.require(name("qzeros"), ("I32",), (groups, out * bits // 32))
    reordered = setting(config, "desc_act", bool, False) and not setting(config, "static_groups", bool, False)
    has_index = name("g_idx") in weights
    if has_index or reordered:
        weights.require(name("g_idx"), ("I32",), (width,))
    scheme = scheme_for(
        _FORMATS[bits],
        group,
        width,
        zeros=not symmetric,
        scale_dtype=SCALES[weights.kind(name("scales"))],
        ordered=reordered,
    )
    file = weights.where(name("qweight"))

    def codes() -> Codes:
        u = unpack(weights.read(name("qweight")).T, bits)
        zeros = unpack(weights.read(name("qzeros")), bits).astype(np.int16).T + np.int16(offset)
        half = 2 ** (bits - 1)
        if symmetric and np.any(zeros != half):
            raise SourceError(
                f"{file}: zero points of {module!r} are not {half}, although the config calls it symmetric; "
                'set "sym" to false in its config.json'
            )
        scales = weights.read(name("scales")).T
        index = weights.read(name("g_idx")) if has_index else None
        if index is not None and (index.min() < 0 or index.max() >= groups):
            raise SourceError(f"{file}: {name('g_idx')!r} names groups that are not there; download it again")
        if bits == 8:
            u, zeros = signed(u), zeros - np.int16(half)
        zeros = None if symmetric else zeros.astype(scales.dtype)
        return Codes(_FORMATS[bits], u, scales, zeros, group, index)

    return Linear((out, width), scheme, file, codes)
