"""Builds tiny checkpoints that come quantised, from integer codes drawn here, and checks what becomes of them.

The weights they stand for are computed here in float64 from the same codes, by each form's own formula.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.manifest import read_manifest
from jaxsqueeze.checkpoint.source import TensorSource
from jaxsqueeze.checkpoint.store import load_params
from jaxsqueeze.quant.qtensor import QTensor
from jaxsqueeze.quant.scheme import STORED, Recipe
from tests.checkpoint.build import TINY_CONFIG, flat, write_hf_checkpoint
from tests.engine.dense_oracle import DenseOracle
from tests.models.test_quantised_weights import logits

# Three and five groups of 32 inputs: an odd number of them.
CONFIG: dict[str, Any] = {**TINY_CONFIG, "hidden_size": 96, "intermediate_size": 160, "head_dim": 16}
SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int64": "I64", "uint8": "U8"}
SAFETENSORS |= {"int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0"}
Layer = tuple[dict[str, np.ndarray], np.ndarray]  # stored tensors by their last name, and the weight f64[out, in]


def save(tensors: Mapping[str, np.ndarray], file: Path) -> None:
    """A safetensors file, of types that the package's numpy side does not write too."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor).tobytes()
        ends = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": SAFETENSORS[tensor.dtype.name], "shape": tensor.shape, "data_offsets": ends}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """i32[rows, ceil(n * bits / 32)] of codes without sign [rows, n], the first in the lowest bits."""
    per_word = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word))).astype(np.uint64)
    words = np.zeros((len(codes), codes.shape[1] // per_word), np.uint64)
    for i in range(per_word):
        words |= codes[:, i::per_word] << np.uint64(bits * i)
    return words.astype(np.uint32).view(np.int32)


def write(folder: Path, settings: dict[str, Any], layer: Callable[[str, int, int], Layer]) -> dict[str, np.ndarray]:
    """A Llama checkpoint whose ``*_proj`` layers come from ``layer(module, out, in)``; returns all its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = write_hf_checkpoint(folder, CONFIG)
    stored = {name: x for name, x in plain.items() if not name.endswith("_proj.weight")}
    weights: dict[str, np.ndarray] = dict(stored)
    for name, x in plain.items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            parts, weights[name] = layer(module, *x.shape)
            stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    save(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": settings}))
    return weights


def edit(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Changes the tensors of a folder."""
    tensors = stored_tensors(folder)
    change(tensors)
    save(tensors, folder / "model.safetensors")


def stored_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors as they are stored."""
    raw = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    types = {ours: np.dtype(name) for name, ours in SAFETENSORS.items()}
    return {
        name: np.frombuffer(raw, np.uint8)[8 + size + x["data_offsets"][0] : 8 + size + x["data_offsets"][1]]
        .view(types[x["dtype"]])
        .reshape(x["shape"])
        for name, x in json.loads(raw[8 : 8 + size]).items()
    }


def fused(weights: Mapping[str, np.ndarray], path: str) -> np.ndarray:
    """Our parameter of this path: q, k and v by KV head, gate and up, or the weight itself."""
    unit, _, leaf = path.partition("/")
    if not leaf.endswith("/weight"):
        return weights[{"embed": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}[unit]]
    block, part, _ = leaf.split("/")
    prefix = f"model.layers.{unit.removeprefix('layers_')}.{'self_attn' if block == 'attn' else 'mlp'}."
    if part == "gate_up":
        return np.stack([weights[f"{prefix}{x}_proj.weight"] for x in ("gate", "up")])
    if part != "qkv":
        return weights[f"{prefix}{part}_proj.weight"]
    kv, dim = CONFIG["num_key_value_heads"], CONFIG["head_dim"]
    q, k, v = (weights[f"{prefix}{x}_proj.weight"] for x in "qkv")
    return np.concatenate([x.reshape(kv, -1, dim, x.shape[-1]) for x in (q, k, v)], axis=1)


def check_stored(
    source: TensorSource, out: Path, weights: Mapping[str, np.ndarray], atol: Callable[[str], np.ndarray] | None = None
) -> tuple[str, set[str]]:
    """Converts and compares every quantised weight with what it should be, to the bit unless ``atol`` says how far it
    may be off; also expanded. Returns the manifest's words and all its schemes."""
    manifest = convert(source, out / "stored", name="x", dtype="float32", recipe=Recipe(STORED))
    expanded = dict(flat(load_expanded(source, out / "expanded")))
    for path, x in flat(load_params(out / "stored")):
        assert isinstance(x, QTensor) == (path in manifest.schemes)
        if not isinstance(x, QTensor):
            np.testing.assert_array_equal(x, expanded[path])
            continue
        right = fused(weights, path)
        assert x.shape == right.shape
        assert x.scales.dtype == manifest.schemes[path].scale_dtype
        for found in (np.asarray(x.dequantise()), expanded[path]):
            if atol is None:
                np.testing.assert_array_equal(found, right.astype(np.float32), err_msg=path)
            else:
                assert np.all(np.abs(found - right) <= atol(path)), path
        if path in ("embed/weight", "layers_0/attn/o/weight"):
            rows = np.array([0, 5, 17])
            np.testing.assert_array_equal(x.take(rows), np.asarray(x.dequantise())[rows])
    schemes = {f"{scheme}{' ordered' * scheme.ordered}" for scheme in manifest.schemes.values()}
    return manifest.quantisation, schemes


def load_expanded(source: TensorSource, out: Path) -> dict[str, Any]:
    convert(source, out, name="x", dtype="float32", recipe=Recipe("bf16"))
    return jax.tree.map(np.asarray, load_params(out))


def check_logits(folder: Path, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> None:
    """Of the model converted to ``folder``, against a float64 forward pass with ``weights``."""
    layers = config["num_hidden_layers"]
    hf = {**config, "no_rope_layers": [1] * layers, "layer_types": ["full_attention"] * layers}
    right = DenseOracle(hf, weights).logits(range(6))
    found = np.asarray(logits(read_manifest(folder).config, load_params(folder)))
    np.testing.assert_allclose(found, right, rtol=0, atol=2e-5 * np.abs(right).max())
