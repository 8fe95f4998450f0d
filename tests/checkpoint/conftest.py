"""Fixtures of the checkpoint tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from tests.checkpoint.build import INDEX, read_tensors


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the committed tiny checkpoints, one per family and rope kind."""
    return Path(__file__).parents[1] / "golden"


@pytest.fixture
def sharded(tmp_path: Path, hf_checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint of three shards with an index."""
    folder = hf_checkpoint()
    target = tmp_path / "sharded"
    target.mkdir()
    tensors = read_tensors(folder)
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):
        file = f"model-{i + 1:05d}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[i::3]}
        save_file(part, target / file)
        weight_map |= dict.fromkeys(part, file)
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((folder / name).read_bytes())
    return target
