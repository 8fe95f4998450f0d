"""Runs the app: binds the port first, serves ``/health`` while the engine loads and compiles, drains on SIGTERM.

Exit codes: 0 after a drain or Ctrl-C; 2 for bad input (a checkpoint that cannot be used, a port that is taken), with
one sentence on stderr; 1 for anything unexpected.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from jaxsqueeze.server.app import STOP_SECONDS, create_app
from jaxsqueeze.server.config import ServerConfig
from jaxsqueeze.server.service import Service
from jaxsqueeze.server.worker import EngineLike, Worker

log = logging.getLogger("jaxsqueeze.server")

_CLOSE_SECONDS = 2  # for answers to leave after the last request has ended
_POLL_SECONDS = 0.05


class DrainingServer(uvicorn.Server):
    """On SIGTERM or Ctrl-C: new calls get 503, running requests finish (for at most ``drain_seconds``), then it exits.
    A second signal ends the running requests too; a third exits at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._drain_task: asyncio.Task[None] | None = None
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The signal is not kept for re-raising, as the base class would: a drained server exits with 0.
        self._signals += 1
        self.force_exit = self._signals > 2
        self._service.draining = True
        if self._signals == 1:
            asyncio.get_running_loop().call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._drain_task = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        worker, seconds = self._service.worker, self._service.config.drain_seconds
        if worker.num_unfinished:
            print(f"Waiting up to {seconds:g} s for {worker.num_unfinished} running requests", file=sys.stderr)
        deadline = time.monotonic() + seconds
        while worker.num_unfinished and time.monotonic() < deadline and self._signals == 1:
            await asyncio.sleep(_POLL_SECONDS)
        worker.abort_all("the server is shutting down")
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError:
        sock.close()
        raise
    return sock


def base_url(sock: socket.socket) -> str:
    """A URL for this machine's own clients."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    config: ServerConfig,
    names: tuple[str, ...],
    build: Callable[[], EngineLike],
    on_ready: Callable[[EngineLike, str], None] = lambda engine, url: None,
) -> int:
    """Serves until told to stop; returns the exit code. ``build`` and ``on_ready`` run on the engine's thread."""
    try:
        sock = bind(config.host, config.port)
    except OSError as error:
        print(f"error: cannot listen on {config.host}:{config.port}: {error.strerror}; try --port", file=sys.stderr)
        return 2
    failure: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failure.append(error)
        server.should_exit = True

    def start() -> EngineLike:
        print(
            f"Listening on {base_url(sock)}; /health answers 503 until the model is ready", file=sys.stderr, flush=True
        )
        return build()

    worker = Worker(start, lambda engine: on_ready(engine, base_url(sock)), failed)
    service = Service(config, worker, names)
    uvicorn_config = uvicorn.Config(
        create_app(service), log_level="warning", access_log=False, timeout_graceful_shutdown=_CLOSE_SECONDS
    )
    server = DrainingServer(uvicorn_config, service)
    with sock:
        server.run(sockets=[sock])
    code = _report(failure)
    if not worker.stop(STOP_SECONDS if failure else 0.1):
        # Compiling cannot be interrupted, and must not outlive the process's other parts.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _report(failure: list[BaseException]) -> int:
    if not failure:
        return 0
    if isinstance(failure[0], ValueError | NotImplementedError | OSError):
        print(f"error: {failure[0]}", file=sys.stderr)
        return 2
    log.error("the engine could not be started", exc_info=failure[0])
    return 1
