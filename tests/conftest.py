"""Fixtures that several test folders share: the demo model, and tiny random checkpoints with a tokenizer of their own.

The demo model is fetched once into the user's cache; its conversion is kept in pytest's cache, under a key of the
converting code, so that a change there is always tested.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxsqueeze
from jaxsqueeze.checkpoint import demo
from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.gguf_source import GGUFSource
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.manifest import is_converted
from tests.checkpoint.build import TINY_CONFIG, write_hf_checkpoint


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF file."""
    return demo.fetch()


@pytest.fixture(scope="session")
def demo_model(demo_gguf: Path, request: pytest.FixtureRequest) -> Path:
    """The demo model, converted in bfloat16."""
    package = Path(jaxsqueeze.__file__).parent
    code = sorted(
        [*package.glob("checkpoint/*.py"), *package.glob("models/families/*.py"), package / "models/config.py"]
    )
    key = hashlib.sha256(b"".join(p.read_bytes() for p in code)).hexdigest()[:12]
    parent = request.config.cache.mkdir("demo_model")
    out = parent / key
    if not is_converted(out):
        for old in parent.iterdir():
            if is_converted(old):
                shutil.rmtree(old)
        convert(GGUFSource(demo_gguf), out, name="demo", reuse=True)
    return out


@pytest.fixture(scope="session")
def hf_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny random Llama-shaped checkpoint folder: ``hf_checkpoint(**config overrides)``."""

    def make(**overrides: Any) -> Path:
        folder = tmp_path_factory.mktemp("hf")
        write_hf_checkpoint(folder, {**TINY_CONFIG, **overrides})
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model(hf_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted tiny random model (float32) with a byte-level tokenizer, chat template and EOS <|im_end|>."""
    out = tmp_path_factory.mktemp("converted") / "tiny"
    convert(HFFolder(hf_checkpoint()), out, name="tiny", dtype="float32")
    return out
