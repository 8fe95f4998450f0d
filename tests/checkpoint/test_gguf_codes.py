"""GGUF files whose blocks are our groups keep their codes: Q8_0, Q4_0, Q4_1, alone and fused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.gguf_source import GGUFSource
from jaxsqueeze.checkpoint.manifest import read_manifest
from jaxsqueeze.cli import main
from jaxsqueeze.quant.scheme import STORED, Recipe
from tests.checkpoint.build import TINY_TOKENIZER, gguf_name, tensor_shapes, write_gguf
from tests.checkpoint.quantised_build import CONFIG, check_logits, check_stored, fused

Kind = gguf.GGMLQuantizationType
METADATA = {
    ".block_count": CONFIG["num_hidden_layers"],
    ".context_length": CONFIG["max_position_embeddings"],
    ".embedding_length": CONFIG["hidden_size"],
    ".feed_forward_length": CONFIG["intermediate_size"],
    ".attention.head_count": CONFIG["num_attention_heads"],
    ".attention.head_count_kv": CONFIG["num_key_value_heads"],
    ".attention.layer_norm_rms_epsilon": CONFIG["rms_norm_eps"],
    ".rope.freq_base": CONFIG["rope_theta"],
    ".attention.key_length": CONFIG["head_dim"],
    ".attention.value_length": CONFIG["head_dim"],
    **TINY_TOKENIZER,
}


def blocks(kind: Kind, out: int, width: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raw bytes of rows, the weight f64[out, in], and how large |m| + 15 |d| is."""
    count = width // 32
    d = (rng.uniform(0.01, 0.02, (out, count, 1)) * rng.choice([-1, 1], (out, count, 1))).astype(np.float16)
    if kind == Kind.Q8_0:
        codes = rng.integers(-128, 128, (out, count, 32)).astype(np.int8)
        raw, weight, size = [d.view(np.uint8), codes.view(np.uint8)], d.astype(np.float64) * codes, 0 * d
    else:
        codes = rng.integers(0, 16, (out, count, 32)).astype(np.uint8)
        nibbles = codes[..., :16] | codes[..., 16:] << 4
        if kind == Kind.Q4_0:
            raw, weight, size = [d.view(np.uint8), nibbles], d.astype(np.float64) * (codes - 8.0), 0 * d
        else:
            m = rng.uniform(-0.2, 0.1, d.shape).astype(np.float16)
            d[0], m[1] = 0, 0  # constant blocks, and blocks that are a multiple of d
            d[2] = m[2] = 0
            raw = [d.view(np.uint8), m.view(np.uint8), nibbles]
            weight = d.astype(np.float64) * codes + m.astype(np.float64)
            size = np.abs(m.astype(np.float64)) + 15 * np.abs(d.astype(np.float64))
            size[d == 0] = 0
    wide = np.broadcast_to(size, weight.shape).reshape(out, width)
    return np.concatenate(raw, axis=-1).reshape(out, -1), weight.reshape(out, width), wide


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp stores them: each rotary pair side by side."""
    dim = len(rows) // heads
    place = [head * dim + i // 2 + i % 2 * (dim // 2) for head in range(heads) for i in range(dim)]
    return rows[place]


def write(path: Path, kind_of: dict[str, Kind]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A Llama file, the kinds of its matrices by their last name but one; all weights, and sizes (``blocks``)."""
    rng = np.random.default_rng(0)
    tensors, kinds, weights, sizes = {}, {}, {}, {}
    for name, shape in tensor_shapes(CONFIG).items():
        kind = kind_of.get(name.split(".")[-2]) if len(shape) == 2 else None
        if kind is None:
            weights[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
            tensors[gguf_name(name, "llama")] = weights[name]
            continue
        raw, weights[name], sizes[name] = blocks(kind, *shape, rng)
        heads = {"q_proj": CONFIG["num_attention_heads"], "k_proj": CONFIG["num_key_value_heads"]}
        if name.split(".")[-2] in heads:
            raw = interleaved(raw, heads[name.split(".")[-2]])
        tensors[gguf_name(name, "llama")] = raw
        kinds[gguf_name(name, "llama")] = kind
    write_gguf(path, "llama", METADATA, tensors, kinds)
    return weights, sizes


LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda k: k.name)
def test_codes_are_kept(tmp_path, kind):
    ends = {"embed_tokens": Kind.Q8_0, "lm_head": Kind.Q8_0}
    weights, sizes = write(tmp_path / "x.gguf", dict.fromkeys(LAYERS, kind) | ends)
    # Q4_1 is d * code + m, here (code - zero) * d: the rounding of the zero point.
    found = check_stored(
        GGUFSource(tmp_path / "x.gguf"), tmp_path, weights, lambda path: 2.0**-22 * fused(sizes, path) + 2.0**-60
    )
    assert found[0] == ("Q8_0" if kind == Kind.Q8_0 else f"{kind.name}, Q8_0")
    scheme = {Kind.Q8_0: "int8-g32", Kind.Q4_0: "int4-g32", Kind.Q4_1: "int4-g32-zeros"}[kind]
    assert found[1] == {scheme, "int8-g32"}
    if kind == Kind.Q4_1:
        check_logits(tmp_path / "stored", CONFIG, weights)


def test_parts_of_several_kinds_are_expanded(tmp_path):
    kinds = dict.fromkeys(LAYERS, Kind.Q4_0) | {"v_proj": Kind.Q8_0, "down_proj": Kind.Q8_0}
    weights, _ = write(tmp_path / "x.gguf", kinds)
    source = GGUFSource(tmp_path / "x.gguf")
    manifest = convert(source, tmp_path / "out", name="x", recipe=Recipe(STORED))
    assert {f"{path} {scheme}" for path, scheme in manifest.schemes.items() if path.startswith("layers_0")} == {
        "layers_0/attn/o/weight int4-g32",
        "layers_0/mlp/gate_up/weight int4-g32",
        "layers_0/mlp/down/weight int8-g32",
    }
    assert manifest.notes[0].startswith("2 weights, like layers_0/attn/qkv/weight, were expanded")
    check_stored(source, tmp_path, weights)


def test_other_kinds_are_expanded_in_silence(tmp_path):
    write(tmp_path / "x.gguf", {})
    manifest = convert(GGUFSource(tmp_path / "x.gguf"), tmp_path / "out", name="x", recipe=Recipe(STORED))
    assert (manifest.schemes, manifest.notes, manifest.quantisation) == ({}, (), "none")


def test_the_command_says_how(tmp_path):
    write(tmp_path / "x.gguf", dict.fromkeys(LAYERS, Kind.Q4_0))
    for weights, words in (("stored", "Q4_0"), ("int4", "int4-g64"), ("bf16", "none")):
        out = tmp_path / weights
        assert main(["convert", str(tmp_path / "x.gguf"), str(out), "--weights", weights]) == 0
        assert read_manifest(out).quantisation == words
