"""A second engine of the same configuration runs the first one's programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxsqueeze.config import EngineConfig
from jaxsqueeze.engine import Engine
from jaxsqueeze.runner.compiles import CompileCounter
from jaxsqueeze.types import Request, SamplingParams

PROMPTS = [tuple(range(3, 3 + n)) for n in (1, 9, 40)]


def start(config: EngineConfig) -> tuple[list[list[int]], int]:
    """Tokens of a few requests, and how many programs warm-up compiled."""
    engine = Engine(config)
    counter = CompileCounter()
    engine.warm_up()
    compiled = counter.count
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=i, ignore_eos=True)
        engine.add(Request(str(i), prompt, sampling, arrival=0.0))
        while engine.has_work():
            for event in engine.step():
                assert event.error is None
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
    return [tokens[str(i)] for i in range(len(PROMPTS))], compiled


def test_a_second_start_compiles_nothing_and_answers_alike(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXSQUEEZE_PROGRAMS", str(tmp_path))
    config = EngineConfig(
        model=model, dtype="bfloat16", max_slots=1, max_model_len=64, max_step_tokens=32, kv_bytes=1 << 20
    )
    first, compiled = start(config)
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == 3  # admit, mixed, decode
    assert compiled >= 3
    second, again = start(config)
    assert again == 0
    assert second == first
    (folder / "decode-1-0").write_bytes(b"damaged")
    third, repaired = start(config)
    assert repaired == 1
    assert third == first
