"""Starting, draining, exit codes: real processes, real signals."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from jaxsqueeze.server.config import ServerConfig
from jaxsqueeze.server.launch import bind, serve
from tests.server.scripted_engine import ScriptedEngine
from tests.text import build_tokenizers

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tokenizers.write_folder(tmp_path_factory.mktemp("tokenizer"), build_tokenizers.byte_level())


@pytest.fixture
def launch(folder):
    processes = []

    def make(*args: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.serve_scripted", str(folder), *args],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield make
    for process in processes:
        process.kill()
        process.communicate()


def test_health_is_503_until_ready_then_200(start, tokenizer):
    go = threading.Event()

    def build():
        go.wait(10)
        return ScriptedEngine(tokenizer)

    running = start(build=build, ready=False)
    for _ in range(100):
        try:
            response = running.http.get("/health")
            break
        except httpx.TransportError:
            time.sleep(0.02)
    assert response.status_code == 503
    assert response.json() == {"status": "starting"}
    early = running.post("/v1/completions", prompt="a")
    assert early.status_code == 503
    assert early.json()["error"]["type"] == "service_unavailable"
    assert early.headers["retry-after"]
    assert running.http.get("/v1/models").status_code == 503
    assert running.http.get("/version").status_code == 200
    assert running.http.get("/metrics").status_code == 200
    go.set()
    for _ in range(200):
        if running.http.get("/health").status_code == 200:
            break
        time.sleep(0.01)
    running.complete("a", max_tokens=1)


def test_sigterm_drains_then_exits_with_zero(launch):
    process = launch("0", "30")
    url = process.stdout.readline().strip()
    events: list[str] = []

    def read() -> None:
        body = {"prompt": "abc", "max_tokens": 40, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=20) as response:
            events.extend(line for line in response.iter_lines() if line)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.2)
    keep = httpx.Client(base_url=url)
    assert keep.get("/health").status_code == 200
    process.send_signal(signal.SIGTERM)
    refused = None
    for _ in range(100):
        refused = keep.post("/v1/completions", json={"prompt": "a"})
        if refused.status_code == 503:
            break
    assert refused.status_code == 503
    assert keep.get("/health").json() == {"status": "draining"}
    reader.join(20)
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in events[-2]
    assert process.wait(10) == 0


def test_drain_has_a_bound(launch):
    process = launch("0", "0.3")
    url = process.stdout.readline().strip()
    results: list[httpx.Response] = []
    body = {"prompt": "abc", "max_tokens": 120}
    caller = threading.Thread(target=lambda: results.append(httpx.post(url + "/v1/completions", json=body, timeout=20)))
    caller.start()
    time.sleep(0.2)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert time.monotonic() - begin < 5
    caller.join()
    assert results[0].status_code == 503
    assert "shutting down" in results[0].json()["error"]["message"]


def test_a_second_signal_does_not_wait(launch):
    process = launch("0", "30")
    url = process.stdout.readline().strip()
    body = {"prompt": "abc", "max_tokens": 120, "stream": True}
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=20) as response:
        lines = response.iter_lines()  # kept: dropping it would close the connection
        next(lines)
        process.send_signal(signal.SIGINT)
        while "Waiting" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        assert "shutting down" in [line for line in lines if line][-2]
    assert process.wait(10) == 0
    assert "Traceback" not in process.stderr.read()


def test_sigterm_while_compiling_exits_with_zero(launch):
    process = launch("60", "30")
    assert "Listening on http://127.0.0.1:" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0


@pytest.mark.parametrize(("how", "code"), [("fail", 2), ("bug", 1)])
def test_an_engine_that_cannot_be_built(launch, how, code):
    process = launch("0.2", "1", how)
    assert process.wait(15) == code
    error = process.stderr.read()
    if how == "fail":
        assert error.splitlines()[1:] == ["error: model.safetensors is truncated: download it again"]
    else:
        assert "planted" in error


def test_a_taken_port_is_one_sentence(capsys):
    with bind("127.0.0.1", 0) as sock:
        assert serve(ServerConfig(port=sock.getsockname()[1]), ("x",), lambda: pytest.fail("must not build")) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_binding_is_loopback_by_default():
    with bind(ServerConfig().host, 0) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
        assert sock.family == socket.AF_INET
