"""Hugging Face checkpoints that come quantised: one file for each way of storing them, by ``quant_method``.

A reader turns the tensors of each linear layer into codes, scales and zeros (``quant/codes.py``) exactly; which layers
are quantised, and how they can be kept, it knows from names, types, shapes and config alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxsqueeze.checkpoint.prequantised import awq, compressed_tensors, fp8_blocks, gptq, mxfp4
from jaxsqueeze.checkpoint.prequantised.linear import Prequantised
from jaxsqueeze.checkpoint.safetensors_files import SafetensorsFiles
from jaxsqueeze.checkpoint.source import SourceError

READERS = {
    "gptq": gptq.read,
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8_blocks.read,
    "mxfp4": mxfp4.read,
}
_CURE = "convert the unquantised checkpoint with --weights int4 or int8 instead"


def read(hf_config: Mapping[str, Any], weights: SafetensorsFiles) -> Prequantised:
    """What is quantised in a folder, nothing if its config says so. SourceError for methods that are not supported."""
    text = hf_config.get("text_config")
    holders = [hf_config, text if isinstance(text, Mapping) else {}]
    config = next((c for h in holders for k in ("quantization_config", "compression_config") if (c := h.get(k))), None)
    if config is None:
        return Prequantised("none", {}, frozenset())
    if not isinstance(config, Mapping):
        raise SourceError(f"{weights.path}: its quantization_config is not an object; download it again")
    method = config.get("quant_method", "unknown")
    if method == "bitsandbytes" or config.get("load_in_4bit") or config.get("load_in_8bit"):
        kind = "int8" if config.get("load_in_8bit") else config.get("bnb_4bit_quant_type", "4-bit")
        raise SourceError(f"{weights.path}: bitsandbytes {kind} weights are not supported; {_CURE}")
    if method not in READERS:
        raise SourceError(
            f"{weights.path}: weights quantised by the method {method!r} are not supported "
            f"({', '.join(READERS)} are); {_CURE}"
        )
    try:
        found = READERS[method](config, weights)
    except SourceError as error:
        if str(weights.path) in str(error):
            raise
        raise SourceError(f"{weights.path}: {error}") from error
    if not found.linears:
        raise SourceError(
            f"{weights.path}: the config says that weights are quantised by {method}, but none is; "
            "use config and weights of the same model"
        )
    return found
