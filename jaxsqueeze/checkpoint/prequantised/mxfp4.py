"""MXFP4 weights as the gpt-oss release stores them (OCP Microscaling Formats 1.0, 2023).

<name>_blocks  u8[out, groups, 16]  e2m1 codes of 32 inputs; byte j has input 2j in its low nibble, 2j + 1 above it
<name>_scales  u8[out, groups]      E8M0: the scale is 2^(e - 127)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxsqueeze.checkpoint.prequantised.linear import Linear, Prequantised
from jaxsqueeze.checkpoint.safetensors_files import SafetensorsFiles
from jaxsqueeze.checkpoint.source import SourceError
from jaxsqueeze.quant.codes import Codes, scheme_for

GROUP = 32
_BLOCKS, _SCALES = "_blocks", "_scales"
_NAN = 255


def read(config: Mapping[str, Any], weights: SafetensorsFiles) -> Prequantised:
    del config  # nothing in it says how a weight is stored
    stems = sorted(name.removesuffix(_BLOCKS) for name in weights.names() if name.endswith(_BLOCKS))
    linears = {f"{stem.removesuffix('.weight')}.weight": _linear(weights, stem) for stem in stems}
    hidden = {f"{stem}{part}" for stem in stems for part in (_BLOCKS, _SCALES)}
    return Prequantised("mxfp4", linears, frozenset(hidden))


def _linear(weights: SafetensorsFiles, stem: str) -> Linear:
    blocks, scales = f"{stem}{_BLOCKS}", f"{stem}{_SCALES}"
    weights.require(blocks, ("U8",))
    file, shape = weights.where(blocks), weights.shape(blocks)
    if len(shape) != 3 or shape[2] != GROUP // 2:
        raise SourceError(
            f"{file}: tensor {blocks!r} of shape {list(shape)} is no matrix of mxfp4 blocks, and weights of experts "
            "are not supported yet; use a checkpoint of a dense model"
        )
    out, groups, _ = shape
    width = groups * GROUP
    weights.require(scales, ("U8",), (out, groups))
    scheme = scheme_for("fp4", GROUP, width, zeros=False, scale_dtype="bfloat16")

    def codes() -> Codes:
        data = weights.read(blocks)
        exponents = weights.read(scales)
        if np.any(exponents == _NAN):
            raise SourceError(f"{file}: tensor {scales!r} has scales that are no numbers; download it again")
        nibbles = np.stack((data & 15, data >> 4), axis=-1).reshape(out, width)
        powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
        return Codes("fp4", nibbles, powers.astype(ml_dtypes.bfloat16), None, GROUP)

    return Linear((out, width), scheme, file, codes)
