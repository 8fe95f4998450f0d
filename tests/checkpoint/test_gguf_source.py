"""GGUF files as checkpoints: the same parameters and settings as their Hugging Face originals.

The twin of each golden checkpoint is written here the way llama.cpp's converter writes it (see ``build.py``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxsqueeze.checkpoint.assemble import build_unit, prepare
from jaxsqueeze.checkpoint.gguf_config import llama3_divisors
from jaxsqueeze.checkpoint.gguf_source import GGUFSource
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.source import SourceError
from jaxsqueeze.models.config import ModelConfig
from tests.checkpoint.build import (
    TINY_CONFIG,
    TINY_TOKENIZER,
    flat,
    gguf_twin,
    read_tensors,
    write_gguf,
    write_hf_checkpoint,
)

F32 = np.dtype(np.float32)
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_linear": ("llama", {".rope.scaling.type": "linear", ".rope.scaling.factor": 2.5}),
    "llama_yarn": (
        "llama",
        {
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 4.0,
            ".rope.scaling.original_context_length": 16,
            ".rope.scaling.yarn_beta_fast": 2.0,
            ".rope.scaling.yarn_beta_slow": 0.25,
        },
    ),
    "mistral": ("llama", {".attention.sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {}),
    "gemma2": (
        "gemma2",
        {".attention.sliding_window": 5, ".attn_logit_softcapping": 3.0, ".final_logit_softcapping": 4.0},
    ),
    "gemma3": (
        "gemma3",
        {
            ".attention.sliding_window": 5,
            ".rope.freq_base_swa": 30.0,
            ".rope.scaling.type": "linear",
            ".rope.scaling.factor": 4.0,
        },
    ),
}


def twin(golden: Path, name: str, tmp_path: Path) -> tuple[Path, Path]:
    folder = golden / name
    architecture, extra = TWINS[name]
    path = gguf_twin(folder, tmp_path / f"{name}.gguf", architecture, extra)
    return folder, path


@pytest.mark.parametrize("name", TWINS)
def test_twins_give_the_same_parameters(golden: Path, tmp_path: Path, name: str) -> None:
    folder, path = twin(golden, name, tmp_path)
    ours, theirs = prepare(GGUFSource(path)), prepare(HFFolder(folder))
    assert ours.units == theirs.units
    for unit in theirs.units:
        expected = dict(flat(build_unit(theirs, unit, F32, {})))
        got = dict(flat(build_unit(ours, unit, F32, {})))
        assert set(got) == set(expected)
        for leaf, value in expected.items():
            if name.startswith("gemma"):  # the writer's +1 rounds
                np.testing.assert_allclose(got[leaf], value, rtol=0, atol=3e-7)
            else:
                np.testing.assert_array_equal(got[leaf], value)


@pytest.mark.parametrize("name", [n for n in TWINS if n != "gemma3"])
def test_twins_give_the_same_config(golden: Path, tmp_path: Path, name: str) -> None:
    folder, path = twin(golden, name, tmp_path)
    ours, theirs = prepare(GGUFSource(path)).config, prepare(HFFolder(folder)).config
    # The tokenizer of the twin is another one; Gemma's attention scale is not in the file, and follows from its sizes.
    same = {"bos_token_id": None, "eos_token_ids": (), "attn_scale": 0.0}
    if name == "gemma2":
        assert ours.attn_scale == pytest.approx(8**-0.5)
    else:
        assert ours.attn_scale == theirs.attn_scale
    if name in ("smollm3", "qwen2"):  # per-layer settings that the file does not hold
        same["layers"] = ()
        nope = [name == "smollm3" and (i + 1) % 4 == 0 for i in range(len(ours.layers))]
        assert [layer.rope is None for layer in ours.layers] == nope
        assert {layer.window for layer in ours.layers} == {None}
    assert dataclasses.replace(ours, **same) == dataclasses.replace(theirs, **same)


def test_gemma3_settings(golden: Path, tmp_path: Path) -> None:
    _, path = twin(golden, "gemma3", tmp_path)
    config = prepare(GGUFSource(path)).config
    assert [layer.window for layer in config.layers] == [5, 5, 5, 5]  # every sixth is full
    assert [config.ropes[layer.rope].theta for layer in config.layers] == [30.0] * 4
    assert config.attn_scale == pytest.approx(8**-0.5)
    assert config.qk_norm
    assert config.post_norms
    assert config.embed_scale == 6.0
    assert config.final_softcap is None


def test_phi3_fused_projections_and_longrope(golden: Path, tmp_path: Path) -> None:
    folder = golden / "phi3_short"
    hf = json.loads((folder / "config.json").read_text())
    rope = hf["rope_parameters"]
    tables = {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("long", "short")}
    extra = {
        ".rope.dimension_count": 8,
        ".rope.scaling.original_context_length": hf["original_max_position_embeddings"],
        ".attention.key_length": 10,
    }
    if hf.get("sliding_window"):
        extra[".attention.sliding_window"] = hf["sliding_window"]
    path = gguf_twin(folder, tmp_path / "phi3.gguf", "phi3", extra, more=tables)
    ours, theirs = prepare(GGUFSource(path)), prepare(HFFolder(folder))
    for unit in theirs.units:
        for (leaf, value), (_, expected) in zip(
            flat(build_unit(ours, unit, F32, {})), flat(build_unit(theirs, unit, F32, {})), strict=True
        ):
            np.testing.assert_array_equal(value, expected, err_msg=leaf)
    (mine,), (hers,) = ours.config.ropes, theirs.config.ropes
    assert (mine.kind, mine.rotary_dim, mine.theta) == (hers.kind, hers.rotary_dim, hers.theta)
    assert mine.long_factor == pytest.approx(hers.long_factor)
    assert mine.short_factor == pytest.approx(hers.short_factor)
    assert (mine.original_max_len, mine.factor) == (hers.original_max_len, hers.factor)
    assert ours.config.layers == theirs.config.layers


def llama(
    tmp_path: Path, extra: dict[str, Any] | None = None, more: dict[str, np.ndarray] | None = None
) -> ModelConfig:
    folder = tmp_path / "hf"
    folder.mkdir()
    write_hf_checkpoint(folder, {**TINY_CONFIG, "head_dim": 32})
    path = gguf_twin(folder, tmp_path / "x.gguf", "llama", extra or {}, more=more)
    return prepare(GGUFSource(path)).config


def test_llama3_is_recovered_from_its_table(tmp_path: Path) -> None:
    # Values of transformers' llama3 rope for theta 500000, head_dim 32, factor 8, 1 / 4, trained at 8192.
    dim, theta = 32, 500000.0
    table = []
    for i in range(dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / dim)
        if wavelength < 8192 / 4:
            table.append(1.0)
        elif wavelength > 8192 / 1:
            table.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            table.append(1 / ((1 - smooth) / 8 + smooth))
    assert 1.0 < sorted(set(table))[1] < 8.0  # one of them is blended
    np.testing.assert_allclose(llama3_divisors(theta, dim, 8.0, 1.0, 4.0, 8192), table, rtol=1e-12)
    config = llama(tmp_path, {".rope.freq_base": theta}, more={"rope_freqs.weight": np.array(table, np.float32)})
    (rope,) = config.ropes
    assert (rope.kind, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == ("llama3", 8.0, 1.0, 4.0)
    assert rope.original_max_len == 8192


def test_any_other_table_is_kept_as_it_is(tmp_path: Path) -> None:
    table = np.linspace(1.0, 3.0, 16, dtype=np.float32)
    (rope,) = llama(tmp_path, more={"rope_freqs.weight": table}).ropes
    assert rope.kind == "longrope"
    assert rope.short_factor == rope.long_factor == pytest.approx(tuple(table))
    assert rope.attention_factor == 1.0


def test_unsupported_rope_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="'spiral'"):
        llama(tmp_path, {".rope.scaling.type": "spiral", ".rope.scaling.factor": 2.0})


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "novel", {}, {"token_embd.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(SourceError, match=r"'novel'; known: llama, .*gemma3"):
        GGUFSource(path)


def test_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="mixture-of-experts"):
        llama(tmp_path, {".expert_count": 8})


def test_layers_of_different_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="differs between layers"):
        llama(tmp_path, {".attention.head_count_kv": [2, 4]})


def test_missing_tensor_is_named(tmp_path: Path, hf_checkpoint: Callable[..., Path]) -> None:
    folder = hf_checkpoint()
    path = gguf_twin(folder, tmp_path / "x.gguf", "llama", {}, drop={"model.layers.1.mlp.down_proj.weight"})
    with pytest.raises(SourceError, match=r"x\.gguf.*model\.layers\.1\.mlp\.down_proj\.weight"):
        prepare(GGUFSource(path))


def test_embedding_is_the_head_of_a_file_without_one(tmp_path: Path, hf_checkpoint: Callable[..., Path]) -> None:
    folder = hf_checkpoint()
    untied = prepare(GGUFSource(gguf_twin(folder, tmp_path / "a.gguf", "llama", {})))
    tied = prepare(GGUFSource(gguf_twin(folder, tmp_path / "b.gguf", "llama", {}, drop={"lm_head.weight"})))
    assert "lm_head" in untied.units
    assert "lm_head" not in tied.units
    assert tied.config.tie_embeddings


def test_llama_biases_follow_their_rows(tmp_path: Path, hf_checkpoint: Callable[..., Path]) -> None:
    folder = hf_checkpoint(attention_bias=True)
    rng = np.random.default_rng(3)
    tensors = read_tensors(folder)
    for i in range(2):
        for part, size in (("q", 32), ("k", 16), ("v", 16), ("o", 24)):
            name = f"model.layers.{i}.self_attn.{part}_proj.bias"
            tensors[name] = rng.standard_normal(size).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    path = gguf_twin(folder, tmp_path / "x.gguf", "llama", {})
    ours, theirs = prepare(GGUFSource(path)), prepare(HFFolder(folder))
    for (leaf, value), (_, expected) in zip(
        flat(build_unit(ours, "layers_1", F32, {})), flat(build_unit(theirs, "layers_1", F32, {})), strict=True
    ):
        np.testing.assert_array_equal(value, expected, err_msg=leaf)


def test_gemma_norm_of_zero_is_stored_as_one(golden: Path, tmp_path: Path) -> None:
    # FIELD_FAULTS G: HF 0 is stored as 1, and its effective value is 1.
    folder = golden / "gemma3"
    path = gguf_twin(
        folder, tmp_path / "x.gguf", "gemma3", {".attention.sliding_window": 5},
        replace={"model.norm.weight": np.zeros(36, np.float32)},
    )  # fmt: skip
    source = GGUFSource(path)
    np.testing.assert_array_equal(source.get("model.norm.weight", F32), np.zeros(36))
    scale = build_unit(prepare(source), "final_norm", F32, {})["scale"]
    np.testing.assert_array_equal(scale, np.ones(36))


def test_split_files_are_read_as_one(tmp_path: Path, hf_checkpoint: Callable[..., Path]) -> None:
    folder = hf_checkpoint()
    whole = gguf_twin(folder, tmp_path / "whole.gguf", "llama", {})
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    names = sorted(read_tensors(folder))
    gguf_twin(folder, first, "llama", {}, drop=set(names[::2]) - {"model.embed_tokens.weight"})
    gguf_twin(folder, second, "llama", {}, drop={*names[1::2], "model.embed_tokens.weight"})
    a, b = prepare(GGUFSource(first)), prepare(GGUFSource(whole))
    for unit in b.units:
        for (leaf, value), (_, expected) in zip(
            flat(build_unit(a, unit, F32, {})), flat(build_unit(b, unit, F32, {})), strict=True
        ):
            np.testing.assert_array_equal(value, expected, err_msg=leaf)
    second.unlink()
    with pytest.raises(SourceError, match=r"m-00002-of-00002\.gguf"):
        GGUFSource(first)


def test_end_ids_of_a_file(tmp_path: Path, hf_checkpoint: Callable[..., Path]) -> None:
    tokens = ["<eos>", "a", "b", "ab", "abc", "<end_of_turn>", "<|im_end|>", "<eom>"]
    extra = {
        **TINY_TOKENIZER,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 3, 3, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eom_token_id": 7,
        "tokenizer.chat_template": "{{ messages }}<end_of_turn>",
    }
    path = gguf_twin(hf_checkpoint(), tmp_path / "x.gguf", "llama", extra)
    # The EOS, the end of message, and the turn end that the template writes; <|im_end|> it does not write.
    assert prepare(GGUFSource(path)).config.eos_token_ids == (0, 5, 7)
