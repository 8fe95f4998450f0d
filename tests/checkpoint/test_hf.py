"""Hugging Face folders: what is read, and how broken ones are refused (FIELD_FAULTS G)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxsqueeze.checkpoint.assemble import build_unit, prepare
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.source import SourceError
from tests.checkpoint.build import INDEX, TINY_CONFIG, flat, read_tensors, write_hf_checkpoint

F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(folder: Path) -> str:
    """The one-sentence refusal."""
    with pytest.raises(SourceError) as caught:
        prepare(HFFolder(folder))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_shards_are_read_as_one(sharded: Path) -> None:
    source = HFFolder(sharded)
    expected = read_tensors(sharded)
    assert set(source.names()) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(source.get(name, F32), value)


def test_bfloat16_is_a_view_of_the_file(tmp_path: Path) -> None:
    tensors = write_hf_checkpoint(tmp_path, TINY_CONFIG)
    stored = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    source = HFFolder(tmp_path)
    for name, value in stored.items():
        got = source.get(name, BF16)
        np.testing.assert_array_equal(got.view(np.uint16), value.view(np.uint16))
        assert not got.flags.owndata
        assert not got.flags.writeable
        np.testing.assert_array_equal(source.get(name, F32), value.astype(np.float32))


def test_rounding_to_bfloat16_is_to_nearest_even(tmp_path: Path) -> None:
    tensors = write_hf_checkpoint(tmp_path, TINY_CONFIG)
    got = HFFolder(tmp_path).get("model.norm.weight", BF16)
    bits = tensors["model.norm.weight"].view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # IEEE round to nearest, ties to even, on the bit pattern
    np.testing.assert_array_equal(got.view(np.uint16), rounded.astype(np.uint16))


def test_missing_shard_is_named(sharded: Path) -> None:
    lost = sharded / "model-00002-of-00003.safetensors"
    lost.unlink()
    assert str(lost) in refused(sharded)


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_shard_is_named(sharded: Path, keep: int) -> None:
    cut = sharded / "model-00003-of-00003.safetensors"
    cut.write_bytes(cut.read_bytes()[:keep])
    message = refused(sharded)
    assert str(cut) in message
    assert "truncated" in message


def test_stray_shard_is_ignored(sharded: Path) -> None:
    stray = {"model.embed_tokens.weight": np.full((259, 24), 7.0, np.float32)}
    save_file(stray, sharded / "model-00004-of-00004.safetensors")
    (sharded / "model-junk.safetensors").write_bytes(b"junk")
    got = HFFolder(sharded).get("model.embed_tokens.weight", F32)
    assert not (got == 7.0).any()


def test_tensor_that_the_index_lists_but_the_shard_lacks(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    holder = next(f for f in sorted(sharded.glob("*.safetensors")) if "model.norm.weight" in _names(f))
    if holder.name == "model-00001-of-00003.safetensors":
        index["weight_map"]["model.norm.weight"] = "model-00002-of-00003.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    message = refused(sharded)
    assert "model.norm.weight" in message
    assert index["weight_map"]["model.norm.weight"] in message


def _names(file: Path) -> list[str]:
    data = file.read_bytes()
    return list(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))


def test_tensor_missing_from_the_index(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["model.layers.1.mlp.down_proj.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    message = refused(sharded)
    assert "model.layers.1.mlp.down_proj.weight" in message
    assert str(sharded) in message


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "sub/model.safetensors", 7])
def test_index_cannot_point_out_of_the_folder(sharded: Path, name: object) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (sharded / INDEX).write_text(json.dumps(index))
    assert INDEX in refused(sharded)


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert INDEX in refused(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_damaged_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert INDEX in refused(sharded)


def test_wrong_shape_names_tensor_file_and_both_shapes(hf_checkpoint: Callable[..., Path]) -> None:
    folder = hf_checkpoint()
    edit_config(folder, intermediate_size=44)
    message = refused(folder)
    assert "model.layers.0.mlp.gate_proj.weight" in message
    assert str(folder / "model.safetensors") in message
    assert "[40, 24]" in message
    assert "[44, 24]" in message


def test_explicit_head_dim_counts(tmp_path: Path) -> None:
    # hidden 8, 2 heads, head_dim 8: q_proj is 16 x 8, not 8 x 8.
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    tensors = write_hf_checkpoint(tmp_path, {**TINY_CONFIG, **sizes})
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (16, 8)
    job = prepare(HFFolder(tmp_path))
    assert build_unit(job, "layers_0", F32, {})["attn"]["qkv"]["weight"].shape == (1, 4, 8, 8)


def test_unknown_architecture_lists_the_known_ones(hf_checkpoint: Callable[..., Path]) -> None:
    folder = hf_checkpoint()
    edit_config(folder, architectures=["NovelForCausalLM"])
    message = refused(folder)
    assert "NovelForCausalLM" in message
    for known in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"):
        assert known in message


def test_unsupported_rope_type_is_named(hf_checkpoint: Callable[..., Path]) -> None:
    folder = hf_checkpoint()
    edit_config(folder, rope_scaling={"rope_type": "spiral", "factor": 2.0})
    message = refused(folder)
    assert "spiral" in message
    assert str(folder) in message


def test_untied_without_a_head_is_refused(hf_checkpoint: Callable[..., Path]) -> None:
    folder = hf_checkpoint(tie_word_embeddings=True)  # writes no head
    edit_config(folder, tie_word_embeddings=False)
    assert "lm_head.weight" in refused(folder)


def test_tied_uses_the_embedding_whether_or_not_a_head_is_stored(hf_checkpoint: Callable[..., Path]) -> None:
    without, with_head = hf_checkpoint(tie_word_embeddings=True), hf_checkpoint()
    edit_config(with_head, tie_word_embeddings=True)
    for folder in (without, with_head):
        job = prepare(HFFolder(folder))
        assert "lm_head" not in job.units
        assert job.config.tie_embeddings


def test_weights_that_have_no_place_are_refused(hf_checkpoint: Callable[..., Path]) -> None:
    # A bias that the config does not announce would be dropped in silence.
    folder = hf_checkpoint()
    tensors = read_tensors(folder)
    tensors["model.layers.1.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert "model.layers.1.self_attn.q_proj.bias" in refused(folder)


def test_derived_tensors_are_ignored(hf_checkpoint: Callable[..., Path]) -> None:
    folder = hf_checkpoint()
    tensors = read_tensors(folder)
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    save_file(tensors, folder / "model.safetensors")
    prepare(HFFolder(folder))


def test_quantised_weights_are_refused(hf_checkpoint: Callable[..., Path]) -> None:
    folder = hf_checkpoint()
    tensors = read_tensors(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = np.zeros(tensors[name].shape, np.int8)
    save_file(tensors, folder / "model.safetensors")
    message = refused(folder)
    assert name in message
    assert "I8" in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_never_run(tmp_path: Path, name: str) -> None:
    planted = tmp_path / "ran"
    write_hf_checkpoint(tmp_path, TINY_CONFIG)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch " + str(planted).encode() + b"'\ntR.")
    message = refused(tmp_path)
    assert str(tmp_path / name) in message
    assert not planted.exists()


def test_code_of_a_checkpoint_never_runs(tmp_path: Path) -> None:
    planted = tmp_path / "ran"
    write_hf_checkpoint(tmp_path, TINY_CONFIG)
    for module in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "__init__.py"):
        (tmp_path / module).write_text(f"open({str(planted)!r}, 'w')\nclass X: pass\n")
    edit_config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "configuration_x.X"})
    source = HFFolder(tmp_path)
    job = prepare(source)
    assert "auto_map" not in source.hf_config
    assert not planted.exists()
    assert not any(name.endswith(".py") for name in job.tokenizer_files)


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ({"eos_token_id": [1]}, None, "é-none", (1,)),
        ({"eos_token_id": [1]}, None, "<|im_end|>", (1, 2)),
        ({"eos_token_id": 0}, [2, 5], "<|im_start|>", (0, 1, 2, 5)),
        (None, 2, None, (2,)),
        (None, None, "<|im_end|>", (2,)),
        (None, None, {"content": "<|im_end|>", "special": True}, (2,)),
    ],
)
def test_end_ids_are_the_union(
    tmp_path: Path, generation: dict | None, config: object, tokenizer: object, expected: tuple[int, ...]
) -> None:
    write_hf_checkpoint(tmp_path, {**TINY_CONFIG, "eos_token_id": config})
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": tokenizer}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert prepare(HFFolder(tmp_path)).config.eos_token_ids == expected


def test_damaged_config_and_tokenizer_are_named(hf_checkpoint: Callable[..., Path]) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        folder = hf_checkpoint()
        (folder / name).write_text('{"a": ')
        assert name in refused(folder)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    assert "config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    assert "safetensors" in refused(tmp_path)


def test_text_model_inside_a_multimodal_checkpoint(golden: Path, tmp_path: Path) -> None:
    config = json.loads((golden / "gemma3" / "config.json").read_text())
    tensors = read_tensors(golden / "gemma3")
    plain = prepare(HFFolder(golden / "gemma3"))
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {prefix + n.removeprefix("model."): v for n, v in tensors.items() if n.startswith("model.")}
        renamed["vision_tower.layers.0.weight"] = np.zeros((2, 2), np.float32)
        save_file(renamed, tmp_path / "model.safetensors")
        outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config}
        (tmp_path / "config.json").write_text(json.dumps(outer))
        job = prepare(HFFolder(tmp_path))
        for unit in plain.units:
            ours, expected = dict(flat(build_unit(job, unit, F32, {}))), dict(flat(build_unit(plain, unit, F32, {})))
            assert set(ours) == set(expected)
            for path, value in ours.items():
                np.testing.assert_array_equal(value, expected[path])
