"""What the routes share: the worker, the names the model goes by, and whether calls are taken now."""

from __future__ import annotations

import functools
import time

from jaxsqueeze.server.config import ServerConfig
from jaxsqueeze.server.errors import ApiError
from jaxsqueeze.server.metrics import Metrics
from jaxsqueeze.server.profiler import Profiler
from jaxsqueeze.server.worker import EngineLike, State, Worker
from jaxsqueeze.text.chat import ChatTemplate
from jaxsqueeze.text.tokenizer import Tokenizer


class Service:
    def __init__(self, config: ServerConfig, worker: Worker, names: tuple[str, ...]) -> None:
        self.config, self.worker, self.names = config, worker, names
        self.metrics = Metrics(names[0], worker)
        self.profiler = Profiler(config.profile_dir)
        self.started = int(time.time())
        self.draining = False

    @property
    def engine(self) -> EngineLike:
        assert self.worker.engine is not None, "routes run only when the worker is ready"
        return self.worker.engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """Raises ValueError if the model has none."""
        return ChatTemplate.of(self.tokenizer)

    @property
    def status(self) -> str:
        """``ready``, or why not."""
        if self.draining:
            return "draining"
        if self.worker.state is State.READY and not self.worker.healthy:
            return "failing"
        return str(self.worker.state)

    def check_open(self) -> None:
        """Raises ApiError 503 while calls are not taken."""
        if self.draining:
            raise ApiError(503, "the server is shutting down")
        if self.worker.state is State.STARTING:
            raise ApiError(503, "the model is being loaded and compiled; /health says when it is ready")
        if self.worker.state is not State.READY:
            raise ApiError(503, f"the engine is {self.worker.state}")

    def check_model(self, name: str | None) -> str:
        """The name to answer with; a request without one means the only model there is."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(
                404, f"model {name!r} is not served here; {self.names[0]!r} is", param="model", code="model_not_found"
            )
        return name
