"""One engine for most engine tests: a tiny random float32 model of one windowed and one full layer, in a pool that
holds 1.6 of its longest requests, so that preemption is easy to force. Two more run deterministically."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import pytest

from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.config import EngineConfig
from jaxsqueeze.engine import Engine
from jaxsqueeze.llm import LLM
from jaxsqueeze.types import Request
from tests.checkpoint.build import read_tensors
from tests.engine.dense_oracle import DenseOracle
from tests.engine.traffic import Answer, alone, among_others

WINDOW = 5
EOS_IDS = (2, 7)  # the tokenizer's and the generation config's
PAGE_BYTES = 2 * 8 * 2 * 8 * 4  # one layer: K and V, tokens, KV heads, head_dim, float32
OPTIONS = {"max_slots": 4, "max_model_len": 128, "page_size": 8, "max_step_tokens": 64, "decode_steps": 3}
FULL_PAGES, WINDOW_PAGES = 16, 10  # that one request of 128 tokens needs
HF = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "no_rope_layers": [1, 1],
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="session")
def checkpoint(hf_checkpoint: Callable[..., Path]) -> Path:
    folder = hf_checkpoint(**HF)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_IDS[1]]}))
    return folder


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> DenseOracle:
    return DenseOracle(json.loads((checkpoint / "config.json").read_text()), read_tensors(checkpoint), EOS_IDS)


@pytest.fixture(scope="session")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The converted folder, float32."""
    out = tmp_path_factory.mktemp("engine") / "windowed"
    convert(HFFolder(checkpoint), out, name="windowed", dtype="float32")
    return str(out)


@pytest.fixture(scope="session")
def _llm(model: str) -> LLM:
    kv_bytes = PAGE_BYTES * (2 + int(1.6 * (FULL_PAGES + WINDOW_PAGES)))
    with pytest.MonkeyPatch.context() as patch:
        # Compiled for speed of compiling: the same programs, less polished machine code.
        options = {"xla_backend_optimization_level": 0}
        quick = functools.partialmethod(jax.stages.Lowered.compile, compiler_options=options)
        patch.setattr(jax.stages.Lowered, "compile", quick)
        return LLM(model, progress=False, dtype="float32", kv_bytes=kv_bytes, **OPTIONS)


@pytest.fixture
def llm(_llm: LLM, oracle: DenseOracle) -> Iterator[LLM]:
    """Whatever a test does, it compiles nothing and leaves nothing behind."""
    oracle.compile()
    compiled = _llm.engine.compiles_since_ready
    yield _llm
    _llm.engine.check_integrity()
    stats = _llm.engine.stats()
    assert (stats.running, stats.waiting, sum(stats.pages_used)) == (0, 0, 0)
    assert _llm.engine.compiles_since_ready == compiled


@pytest.fixture
def engine(llm: LLM) -> Engine:
    return llm.engine


@pytest.fixture(params=[alone, among_others])
def answer(engine: Engine, request: pytest.FixtureRequest) -> Callable[..., list[Answer]]:
    """``answer(*requests)``: their answers, on an idle engine and in a mixed batch with preemption."""

    def run(*requests: Request) -> list[Answer]:
        answers: Sequence[Answer] = request.param(engine, requests)
        return list(answers)

    return run


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def deterministic(model: str, request: pytest.FixtureRequest) -> Engine:
    """Long enough for several blocks of keys."""
    options = {**OPTIONS, "max_model_len": 640, "deterministic": True, "dtype": request.param, "kv_bytes": 2**20}
    engine = Engine(EngineConfig(model=model, **options))
    engine.warm_up()
    return engine
