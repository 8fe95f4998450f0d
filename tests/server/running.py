"""Servers in a thread of the test process."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time

import httpx
import openai
import uvicorn

from jaxsqueeze.server.app import create_app
from jaxsqueeze.server.config import ServerConfig
from jaxsqueeze.server.launch import DrainingServer, base_url, bind
from jaxsqueeze.server.service import Service
from jaxsqueeze.server.worker import Worker
from tests.server.scripted_engine import ScriptedEngine


@dataclasses.dataclass
class Running:
    """A server in a thread of this process, on a free port of the loopback."""

    url: str
    engine: ScriptedEngine
    service: Service
    server: DrainingServer
    thread: threading.Thread
    http: httpx.Client

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=20)

    def post(self, path: str, **body) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt, **body) -> dict:
        response = self.post("/v1/completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, status: int = 400, **body) -> dict:
        """Sends a bad request; checks the error's shape and that the next good one works. Returns the error."""
        return self.survives(self.post(path, **body), status)

    def survives(self, response: httpx.Response, status: int = 400) -> dict:
        assert response.status_code == status, (response.status_code, response.text[:500])
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert self.complete("ok", max_tokens=1)["choices"][0]["finish_reason"] == "length"
        return error

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        self.http.close()


def run_server(engine, config: ServerConfig | None = None, build=None) -> Running:
    config = config or ServerConfig(port=0)
    worker = Worker(build or (lambda: engine))
    service = Service(config, worker, ("scripted", "alias"))
    sock = bind("127.0.0.1", 0)
    server = DrainingServer(uvicorn.Config(create_app(service), log_level="warning"), service)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    url = base_url(sock)
    return Running(url, engine, service, server, thread, httpx.Client(base_url=url, timeout=20))


def wait_ready(running: Running, seconds: float = 5.0) -> Running:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and running.thread.is_alive():
        try:
            if running.http.get("/health").status_code == 200:
                return running
        except httpx.TransportError:
            pass
        threading.Event().wait(0.01)
    raise AssertionError("the server did not become ready")
