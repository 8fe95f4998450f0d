"""``jaxsqueeze convert``: exit codes, one sentence for bad input, nothing written then."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxsqueeze.checkpoint.manifest import read_manifest
from jaxsqueeze.cli import main
from tests.checkpoint.build import gguf_twin, read_tensors

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test runs in an empty folder, so that default outputs show."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_script_converts_to_the_default_folder(here: Path, hf_checkpoint: Callable[..., Path]) -> None:
    folder = hf_checkpoint()
    command = [sys.executable, str(ROOT / "scripts" / "convert.py"), str(folder), "--dtype", "float32"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == f"checkpoints/{folder.name}\n"
    assert read_manifest(here / "checkpoints" / folder.name).dtype == "float32"


def test_gguf_to_a_chosen_folder(here: Path, tmp_path: Path, hf_checkpoint: Callable[..., Path]) -> None:
    file = gguf_twin(hf_checkpoint(), tmp_path / "m.gguf", "llama", {})
    assert main(["convert", str(file), "out"]) == 0
    manifest = read_manifest(here / "out")
    assert (manifest.dtype, manifest.source) == ("bfloat16", str(file))


def test_out_that_exists(here: Path, hf_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(hf_checkpoint())
    assert main(["convert", folder, "out"]) == 0
    assert main(["convert", folder, "out", "--dtype", "float32"]) == 2
    assert "--force" in capsys.readouterr().err
    assert read_manifest(here / "out").dtype == "bfloat16"
    assert main(["convert", folder, "out", "--dtype", "float32", "--force"]) == 0
    assert read_manifest(here / "out").dtype == "float32"


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def drop(folder: Path, name: str) -> None:
    tensors = read_tensors(folder)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


def reshape(folder: Path) -> None:
    tensors = read_tensors(folder)
    tensors["model.norm.weight"] = np.ones(25, np.float32)
    save_file(tensors, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


# What is wrong: how it is made, and what the sentence names (file or field, and cure).
BAD: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "truncated": (truncate, ["model.safetensors", "download"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["no safetensors", "download"]),
    "tensor missing": (lambda f: drop(f, "model.norm.weight"), ["model.norm.weight", "download"]),
    "no head": (lambda f: drop(f, "lm_head.weight"), ["lm_head.weight", "complete"]),
    "wrong shape": (reshape, ["model.safetensors", "model.norm.weight", "[25]", "[24]"]),
    "unknown architecture": (lambda f: edit(f, architectures=["Novel"]), ["'Novel'", "known: LlamaForCausalLM"]),
    "rope type": (lambda f: edit(f, rope_scaling={"rope_type": "spiral"}), ["'spiral'", "supported: default"]),
    "config field": (lambda f: edit(f, hidden_size=None), ["hidden_size"]),
    "config type": (lambda f: edit(f, num_hidden_layers="two"), ["wrong kind", "download"]),
    "heads": (lambda f: edit(f, num_key_value_heads=3), ["num_kv_heads 3"]),
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_writes_nothing(
    here: Path, hf_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str], case: str
) -> None:
    folder = hf_checkpoint()
    break_it, named = BAD[case]
    break_it(folder)
    assert main(["convert", str(folder), "deep/out"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    for text in (str(folder), *named):
        assert text in captured.err
    assert list(here.iterdir()) == []


def test_places_that_cannot_be_written(
    here: Path, hf_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "file").write_text("")
    assert main(["convert", str(hf_checkpoint()), "file/out"]) == 2
    error = capsys.readouterr().err
    assert "file" in error
    assert error.count("\n") == 1


def test_a_checkpoint_without_a_tokenizer_is_noted(
    here: Path, golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(golden / "llama"), "out"]) == 0
    assert "no tokenizer.json" in capsys.readouterr().err
