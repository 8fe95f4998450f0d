"""One real server for all end-to-end tests: a tiny random model behind uvicorn in a thread of this process.

The pool is small: four long requests do not fit at once, so preemption happens.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxsqueeze.config import EngineConfig
from jaxsqueeze.engine import Engine
from jaxsqueeze.server.config import ServerConfig
from tests.server.running import Running, run_server, wait_ready
from tests.server.wire_checks import eventually

OPTIONS = {
    "dtype": "float32",
    "max_slots": 4,
    "max_model_len": 128,
    "page_size": 8,
    "max_step_tokens": 32,
    "decode_steps": 2,
}
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # layers, K and V, KV heads, head_dim, float32
POOL_TOKENS = 152


@pytest.fixture(scope="session")
def engine_options(tiny_model: Path) -> dict[str, object]:
    return {**OPTIONS, "model": str(tiny_model), "kv_bytes": TOKEN_BYTES * POOL_TOKENS}


@pytest.fixture(scope="session")
def _running(engine_options):
    def build() -> Engine:
        engine = Engine(EngineConfig(**engine_options))
        engine.warm_up()
        return engine

    running = run_server(None, ServerConfig(port=0), build)
    wait_ready(running, seconds=280)
    yield running
    running.stop()


@pytest.fixture
def real(_running: Running):
    """The server; after each test nothing may be left running, no page held, and nothing compiled."""
    yield _running
    engine = _running.service.engine
    eventually(lambda: not engine.has_work())
    stats = engine.stats()
    assert (stats.running, stats.waiting, sum(stats.pages_used)) == (0, 0, 0)
    engine.check_integrity()
    assert engine.compiles_since_ready == 0
