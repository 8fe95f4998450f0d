"""FP8 checkpoints of the DeepSeek-V3 and Qwen3 form: e4m3 weights with a scale for each block of outputs and inputs, or
one for the whole tensor.

    weight            float8_e4m3fn[out, in]
    weight_scale_inv  [out / 128, in / 128]  weight = code * scale (the inverse of what the writer multiplied by)
    weight_scale      one number, where the config has no weight_block_size
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxsqueeze.checkpoint.prequantised.linear import SCALES, Linear, Prequantised, modules, setting
from jaxsqueeze.checkpoint.safetensors_files import SafetensorsFiles
from jaxsqueeze.checkpoint.source import SourceError
from jaxsqueeze.quant.codes import Codes, scheme_for

_SCALES = ("weight_scale_inv", "weight_scale")
_OTHERS = ("input_scale", "activation_scale", "k_scale", "v_scale")
_NOTE = "activations are not quantised here: the checkpoint's scales for them are not used"


def read(config: Mapping[str, Any], weights: SafetensorsFiles) -> Prequantised:
    if (fmt := config.get("fmt", "e4m3")) != "e4m3":
        raise SourceError(f"fp8 weights of the type {fmt!r} are not supported (e4m3 is); use another checkpoint")
    block = setting(config, "weight_block_size", list, None)
    if block is not None and not (len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise SourceError(f"its quantisation config has weight_block_size = {block}, which is not known")
    names = frozenset(weights.names())
    quantised = [m for m in modules(names, "weight") if weights.kind(f"{m}.weight") == "F8_E4M3"]
    linears = {f"{m}.weight": linear(weights, m, _SCALES, block) for m in quantised}
    hidden = {name for name in names if name.rsplit(".", 1)[-1] in (*_SCALES, *_OTHERS)}
    unused = any(name.rsplit(".", 1)[-1] in _OTHERS for name in names)
    return Prequantised("fp8", linears, frozenset(hidden | set(linears)), (_NOTE,) if unused else ())


def linear(weights: SafetensorsFiles, module: str, parts: tuple[str, ...], block: list[int] | None) -> Linear:
    """An fp8 layer whose scales are called one of ``parts``: one for each ``block`` [outputs, inputs], or, without
    blocks, one for each output or for all."""
    weight = f"{module}.weight"
    scales = next((name for part in parts if (name := f"{module}.{part}") in weights), f"{module}.{parts[0]}")
    weights.require(weight, ("F8_E4M3",))
    if len(shape := weights.shape(weight)) != 2:
        raise SourceError(f"{weights.where(weight)}: tensor {weight!r} is no matrix; use another checkpoint")
    out, width = shape
    if block:
        weights.require(scales, SCALES, (math.ceil(out / block[0]), math.ceil(width / block[1])))
    else:
        weights.require(scales, SCALES, (), (1,), (1, 1), (out,), (out, 1))
    rows, group = block or (1, width)
    scheme = scheme_for("fp8", group, width, zeros=False, scale_dtype=SCALES[weights.kind(scales)])

    def codes() -> Codes:
        values = weights.read(scales)
        if weights.kind(scales) == "F8_E8M0":
            values = values.astype(SCALES["F8_E8M0"])
        values = values.reshape(-1, math.ceil(width / group))
        if len(values) == 1:
            values = values.repeat(out, axis=0)
        elif block:
            values = values.repeat(rows, axis=0)[:out]
        return Codes("fp8", weights.read(weight), values, None, group)

    return Linear((out, width), scheme, weights.where(weight), codes)
