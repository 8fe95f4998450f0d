"""Checkpoints of the compressed-tensors package (llm-compressor, Red Hat AI, NVIDIA).

    int-quantized, naive-quantized   weight i8[out, in]
    float-quantized, naive-quantized weight float8_e4m3fn[out, in]
    pack-quantized                   weight_packed i32[out, in * bits / 32], codes plus half their range, the first in a
                                     word's lowest bits; weight_shape i64[2]
    all                              weight_scale, and weight_zero_point i8 like it if not symmetric; pack-quantized
                                     packs zero points along the outputs: i32[out * bits / 32, groups]
                                     weight_g_idx i32[in], each input's group, where "actorder" was "group"

weight = (code - zero) * scale. A scale is for a tensor, [1]; channel, [out, 1]; group, [out, groups]; or block,
[out / rows, in / columns]. ``config_groups`` says which, and for which modules: by name, "re:" and a pattern, or class.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxsqueeze.checkpoint.prequantised import fp8_blocks
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

_LAYOUTS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_PACKED = {2: "int2", 4: "int4", 8: "int8"}
_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_OTHERS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale")
_NOTE = "activations and KV are not quantised here as the checkpoint asks: its settings for them are not used"


@dataclasses.dataclass(frozen=True)
class _Group:
    """One of ``config_groups``. ``block``: outputs and inputs that share a scale, None: all inputs."""

    targets: tuple[str, ...]
    layout: str
    bits: int
    floats: bool
    symmetric: bool
    block: list[int] | None
    ordered: bool

    def format(self, module: str) -> str:
        if self.floats and self.bits == 8 and self.layout != "pack-quantized":
            return "fp8"
        if not self.floats and self.layout != "pack-quantized" and self.bits <= 8:
            return "int8"
        if not self.floats and self.layout == "pack-quantized" and self.bits in _PACKED:
            return _PACKED[self.bits]
        kind = "float" if self.floats else "int"
        raise SourceError(
            f"weights of {module!r}, {self.layout} {kind} of {self.bits} bits, are not supported (int8, fp8 and packed "
            "int2, int4 and int8 are); use another checkpoint"
        )


def read(config: Mapping[str, Any], weights: SafetensorsFiles) -> Prequantised:
    sparsity = setting(config, "sparsity_config", Mapping, {})
    if sparsity.get("format", "dense") != "dense":
        raise SourceError(f"sparse weights ({sparsity['format']}) are not supported; use another checkpoint")
    groups, activations = _groups(config)
    ignored = tuple(setting(config, "ignore", list, []))
    names = frozenset(weights.names())
    packed = modules(names, "weight_packed")
    plain = [m for m in modules(names, "weight") if weights.kind(f"{m}.weight") in ("I8", "F8_E4M3")]
    linears = {}
    for module in sorted({*packed, *plain}):
        if _matches(module, ignored):
            raise SourceError(f"{module!r} has quantised weights although the config ignores it; download it again")
        group = next((g for g in groups if _matches(module, g.targets)), None)
        if group is None:
            raise SourceError(f"no config group is for {module!r}, which has quantised weights; download it again")
        linears[f"{module}.weight"] = _linear(group, weights, module)
    other = {name for name in names if name.rsplit(".", 1)[-1] in _OTHERS}
    hidden = {name for name in names if name.rsplit(".", 1)[-1] in _PARTS} | other | set(linears)
    notes = (_NOTE,) if activations or other or config.get("kv_cache_scheme") else ()
    return Prequantised("compressed-tensors", linears, frozenset(hidden), notes)


def _groups(config: Mapping[str, Any]) -> tuple[list[_Group], bool]:
    """Those that quantise weights, the most specific targets first; whether any quantises activations."""
    groups, activations = [], False
    for group in setting(config, "config_groups", Mapping).values():
        if not isinstance(group, Mapping) or not isinstance(weights := group.get("weights") or {}, Mapping):
            raise SourceError("its config_groups are not known; download it again")
        activations |= bool(group.get("input_activations") or group.get("output_activations"))
        if not weights:
            continue
        layout = group.get("format") or config.get("format")
        if layout not in _LAYOUTS:
            raise SourceError(
                f"the compressed-tensors format {layout!r} is not supported ({', '.join(_LAYOUTS)} are); "
                "use another checkpoint"
            )
        targets = tuple(setting(group, "targets", list))
        groups.append(
            _Group(
                targets=targets,
                layout=layout,
                bits=setting(weights, "num_bits", int, 8),
                floats=setting(weights, "type", str, "int") == "float",
                symmetric=setting(weights, "symmetric", bool, True),
                block=_block(weights),
                ordered=weights.get("actorder") in ("group", "dynamic", True),
            )
        )
    return sorted(groups, key=lambda g: min((_specific(t) for t in g.targets), default=0)), activations


def _block(weights: Mapping[str, Any]) -> list[int] | None:
    size = setting(weights, "group_size", int, -1)
    strategy = weights.get("strategy") or ("group" if size > 0 else "channel")
    if strategy in ("tensor", "channel"):
        return None
    if strategy == "group" and size > 0:
        return [1, size]
    block = weights.get("block_structure")
    block = block.split("x") if isinstance(block, str) else block
    if strategy == "block" and isinstance(block, list) and len(block) == 2 and all(str(n).isdigit() for n in block):
        return [int(n) for n in block]
    raise SourceError(
        f"weights with scales by {strategy} (group_size {size}) are not supported; use another checkpoint"
    )


def _specific(target: str) -> int:
    return 2 if target == "Linear" else 1 if target.startswith("re:") else 0


def _matches(module: str, targets: tuple[str, ...]) -> bool:
    """Every module that has quantised weights counts as a ``Linear``."""
    try:
        return any(
            re.match(t.removeprefix("re:"), module) if t.startswith("re:") else t in (module, "Linear") for t in targets
        )
    except re.error as error:
        raise SourceError(f"its quantisation config has a pattern that is none ({error}); download it again") from error


def _linear(group: _Group, weights: SafetensorsFiles, module: str) -> Linear:
    format = group.format(module)
    if format == "fp8":
        return fp8_blocks.linear(weights, module, ("weight_scale",), group.block)
    packed = group.layout == "pack-quantized"
    name = f"{module}.weight_packed" if packed else f"{module}.weight"
    weights.require(name, ("I32",) if packed else ("I8",))
    file = weights.where(name)
    out, width = _packed_shape(weights, module, group.bits) if packed else weights.shape(name)
    rows, size = group.block or (1, width)
    groups = math.ceil(width / size)
    scale_name, zero_name = f"{module}.weight_scale", f"{module}.weight_zero_point"
    one = () if group.block else ((), (1,), (1, 1))
    weights.require(scale_name, SCALES, (math.ceil(out / rows), groups), *one)
    zeros_packed = not group.symmetric and packed and zero_name in weights and weights.kind(zero_name) == "I32"
    if zeros_packed:
        weights.require(zero_name, ("I32",), (math.ceil(out * group.bits / 32), groups))
    elif not group.symmetric:
        weights.require(zero_name, ("I8",), weights.shape(scale_name))
    index_name = f"{module}.weight_g_idx"
    has_index = index_name in weights
    if has_index or group.ordered:
        weights.require(index_name, ("I32", "I64"), (width,))
    scheme = scheme_for(
        format,
        size,
        width,
        zeros=not group.symmetric,
        scale_dtype=SCALES[weights.kind(scale_name)],
        ordered=group.ordered,
    )

    def codes() -> Codes:
        if packed:
            values = unpack(weights.read(name), group.bits)[:, :width]
            values = signed(values) if group.bits == 8 else values
        else:
            values = weights.read(name)
        scales = _spread(weights.read(scale_name), groups, rows, out)
        zeros = None
        if not group.symmetric:
            stored = weights.read(zero_name)
            if zeros_packed:
                stored = unpack(stored.T, group.bits).astype(np.int16).T[:out] - np.int16(2 ** (group.bits - 1))
            zeros = _spread(stored, groups, rows, out).astype(scales.dtype)
            if format in ("int4", "int2"):  # codes are without sign there
                zeros = zeros + zeros.dtype.type(2 ** (group.bits - 1))
        return Codes(format, values, scales, zeros, size, _index(weights, index_name, groups) if has_index else None)

    return Linear((out, width), scheme, file, codes)


def _packed_shape(weights: SafetensorsFiles, module: str, bits: int) -> tuple[int, int]:
    """[out, in]; ``weight_shape`` is a setting that is stored among the weights."""
    name, packed = f"{module}.weight_shape", f"{module}.weight_packed"
    weights.require(name, ("I64", "I32"), (2,))
    out, width = (int(n) for n in weights.read(name))
    weights.require(packed, ("I32",), (out, math.ceil(width * bits / 32)))
    return out, width


def _spread(values: np.ndarray, groups: int, rows: int, out: int) -> np.ndarray:
    """[out, groups] of what is stored for one tensor, each output, or each block of ``rows`` outputs."""
    values = values.reshape(-1, groups)
    return values.repeat(out if len(values) == 1 else rows, axis=0)[:out]


def _index(weights: SafetensorsFiles, name: str, groups: int) -> np.ndarray | None:
    index = weights.read(name)
    if np.all(index == -1):  # never set: the inputs are in order
        return None
    if index.min() < 0 or index.max() >= groups:
        raise SourceError(f"{weights.where(name)}: {name!r} names groups that are not there; download it again")
    return index
