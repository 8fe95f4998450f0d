"""``checkpoints/catalog.toml``: its facts are those of the code, and its golden outputs are what the model answers."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from jaxsqueeze.checkpoint import demo
from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.gguf_source import GGUFSource
from jaxsqueeze.checkpoint.manifest import read_manifest

CATALOG = Path(__file__).parents[2] / "checkpoints" / "catalog.toml"


@pytest.fixture(scope="module")
def entry() -> dict[str, Any]:
    models = tomllib.loads(CATALOG.read_text())["model"]
    return {model["name"]: model for model in models}[demo.NAME]


def test_the_demo_models_facts(entry: dict[str, Any], demo_model: Path) -> None:
    assert (entry["sha256"], entry["package"], entry["file"]) == (demo.SHA256, demo.PACKAGE, demo.FILE)
    manifest = read_manifest(demo_model)
    assert manifest.source_hash == entry["sha256"]
    assert manifest.config.family == entry["family"]
    assert list(manifest.config.eos_token_ids) == entry["eos_token_ids"]


def test_golden_ids_and_texts_agree(entry: dict[str, Any], demo_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    for golden in entry["golden"]:
        assert tokenizer.decode(golden["ids"], skip_special_tokens=False) == golden["text"]


@pytest.mark.parity
@pytest.mark.timeout(900)
def test_golden_outputs(entry: dict[str, Any], demo_gguf: Path, tmp_path: Path) -> None:
    from jaxsqueeze.llm import LLM
    from jaxsqueeze.types import SamplingParams

    convert(GGUFSource(demo_gguf), tmp_path / "model", name="demo", dtype="float32")
    llm = LLM(
        str(tmp_path / "model"),
        progress=False,
        dtype="float32",
        max_slots=2,
        max_model_len=96,
        max_step_tokens=32,
        kv_bytes=1 << 26,
        deterministic=True,  # one program of each kind to compile
    )
    for golden in entry["golden"]:
        greedy = SamplingParams(temperature=0, max_tokens=len(golden["ids"]))
        (answer,) = llm.generate([golden["prompt"]], greedy)
        assert list(answer.choices[0].token_ids) == golden["ids"]
