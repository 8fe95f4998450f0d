"""A tiny checkpoint whose width no group divides, and a text for its tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(hf_checkpoint: Callable[..., Path]) -> Path:
    """Its matmuls are of two shapes: less to compile."""
    sizes = {"hidden_size": 40, "intermediate_size": 40, "head_dim": 10}
    return hf_checkpoint(**sizes, num_hidden_layers=3, max_position_embeddings=64)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"Line {i} of a text with {i * i} things in it, à la carte.\n" for i in range(60)))
    return file
