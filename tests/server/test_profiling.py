"""Profiler routes: real jax traces, taken on the engine's thread."""

from pathlib import Path

import jax
import jax.numpy as jnp

from jaxsqueeze.server.config import ServerConfig


def test_a_trace_of_running_steps(start, tmp_path):
    running = start(config=ServerConfig(port=0, profile_dir=str(tmp_path / "traces")))
    add = jax.jit(lambda x: x + 1)

    def work(_requests):
        with jax.named_scope("step"):
            add(jnp.ones(8)).block_until_ready()

    running.engine.before_step = work
    running.complete("a", max_tokens=1)
    assert running.post("/stop_profile").status_code == 409
    folder = Path(running.post("/start_profile").json()["trace"])
    assert folder.parent == tmp_path / "traces"
    assert running.post("/start_profile").status_code == 409
    running.complete("a", max_tokens=3)
    assert running.post("/stop_profile").json()["trace"] == str(folder)
    assert list(folder.rglob("*.xplane.pb"))
    assert list(folder.rglob("perfetto_trace.json.gz"))
    assert running.post("/stop_profile").status_code == 409
    running.complete("a", max_tokens=1)
