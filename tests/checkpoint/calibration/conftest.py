"""A tiny checkpoint with widths that no group divides, and a text for its tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(hf_checkpoint: Callable[..., Path]) -> Path:
    return hf_checkpoint(hidden_size=40, intermediate_size=72, num_hidden_layers=3, max_position_embeddings=64)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"Line {i} of a text with {i * i} things in it, à la carte.\n" for i in range(60)))
    return file
