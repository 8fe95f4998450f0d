"""Scripts for the scripted engine, and reading what the server sends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable


def ids_of(tokenizer, text: str) -> list[int]:
    """One token per byte."""
    by_byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [by_byte[bytes([b])] for b in text.encode()]


def stream(server, path="/v1/completions", **body) -> list[dict]:
    """All events of a streamed answer; checks that [DONE] ends it and that nothing follows."""
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def script(server, prompt: str, *pieces: str, eos=True) -> None:
    """Each piece is one engine step of one token per byte."""
    tokenizer = server.engine.tokenizer
    steps = [tuple(ids_of(tokenizer, p)) for p in pieces]
    server.engine.scripts[prompt] = [*steps, (tokenizer.eos_token_id,)] if eos else steps


def eventually(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Waits until ``condition`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def metric(server, name: str, **labels: str) -> float:
    """One sample of ``/metrics``; 0 if it is not there yet."""
    labels = {"model_name": "scripted", **labels}
    for line in server.http.get("/metrics").text.splitlines():
        if line.startswith(f"jaxsqueeze:{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    return 0.0
