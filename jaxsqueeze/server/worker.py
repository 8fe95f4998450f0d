"""The engine's own thread, and the bridge between it and the event loop.

Every call of the engine happens on the worker thread: the loop sends commands through a queue, the thread sends the
events of a whole step back in one ``call_soon_threadsafe``. A step that raises ends the requests it carried; the thread
goes on with the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jaxsqueeze.config import EngineConfig
from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.sched import SchedulerStats
from jaxsqueeze.text.tokenizer import Tokenizer
from jaxsqueeze.types import FinishReason, Request, TokenEvent

if TYPE_CHECKING:
    from jaxsqueeze.checkpoint.manifest import Manifest

log = logging.getLogger("jaxsqueeze.server")

STEPS_LOST = 3  # failed steps in a row after which the engine no longer counts as healthy


class EngineLike(Protocol):
    """What the worker and the routes use of ``jaxsqueeze.engine.Engine``."""

    config: EngineConfig
    manifest: Manifest
    model_config: ModelConfig
    tokenizer: Tokenizer
    max_model_len: int
    compiles_since_ready: int
    failed_steps: int  # in a row, the latest ones: their requests ended with an error, the engine goes on

    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> Any: ...
    def step(self) -> list[TokenEvent]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> SchedulerStats: ...


class State(enum.StrEnum):
    STARTING = "starting"  # loading and compiling
    READY = "ready"
    STOPPED = "stopped"
    FAILED = "failed"  # the engine could not be built, or broke outside a step


class Ticket:
    """Requests that were sent together; their events arrive in ``events`` as (index, event)."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self.events: asyncio.Queue[tuple[int, TokenEvent]] = asyncio.Queue()


class Worker:
    """``build`` returns an engine that is compiled and ready; it runs on the thread. ``on_ready`` and ``on_failed``
    run there too."""

    def __init__(
        self,
        build: Callable[[], EngineLike],
        on_ready: Callable[[EngineLike], None] = lambda engine: None,
        on_failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._build, self._on_ready, self._on_failed = build, on_ready, on_failed
        self._commands: queue.SimpleQueue[Callable[[EngineLike], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._routes: dict[str, tuple[Ticket, int]] = {}  # loop's: unfinished requests
        self._live: set[str] = set()  # thread's: requests inside the engine
        self._failed_steps = 0  # in a row, that raised
        self.engine: EngineLike | None = None
        self.state = State.STARTING
        self.stats: SchedulerStats | None = None  # the engine's, after its latest step

    # ---- event loop side

    def start(self) -> None:
        """Called in the event loop that will receive the events."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ends the thread after its current step; False if it is still busy (compiling) after ``timeout`` seconds."""
        if self._thread.ident is None:
            return True  # never started
        self._commands.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def healthy(self) -> bool:
        if self.state is not State.READY or self.engine is None:
            return False
        return max(self._failed_steps, self.engine.failed_steps) < STEPS_LOST

    @property
    def num_unfinished(self) -> int:
        return len(self._routes)

    async def submit(self, requests: Sequence[Request]) -> Ticket:
        """Adds all requests or none. Raises what ``Engine.add`` raised (RequestRefused)."""
        ticket = Ticket(requests)
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._routes.update({r.id: (ticket, i) for i, r in enumerate(requests)})
        self._commands.put(lambda engine: self._add(engine, requests, accepted))
        try:
            await accepted
        except BaseException:
            self.abort(r.id for r in requests)
            raise
        return ticket

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests early, without further events. Ids that have ended are ignored."""
        ids = [i for i in request_ids if self._routes.pop(i, None)]
        if ids:
            self._commands.put(lambda engine: self._abort(engine, ids))

    def abort_all(self, message: str) -> None:
        """Ends every unfinished request with an error event."""
        ids = list(self._routes)
        for i in ids:
            ticket, index = self._routes[i]
            ticket.events.put_nowait((index, _error_event(i, FinishReason.ABORT, message)))
        self.abort(ids)

    async def call(self, function: Callable[[EngineLike], Any]) -> Any:
        """Runs ``function`` on the engine's thread, between steps; its result or exception."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def command(engine: EngineLike) -> None:
            try:
                result = function(engine)
            except Exception as error:
                self._resolve(done, error=error)
            else:
                self._resolve(done, result)

        self._commands.put(command)
        return await done

    def _deliver(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            route = self._routes.get(event.request_id)
            if route is None:
                continue  # aborted meanwhile
            if event.finish_reason:
                del self._routes[event.request_id]
            ticket, index = route
            ticket.events.put_nowait((index, event))

    # ---- engine's thread

    def _run(self) -> None:
        try:
            engine = self._build()
            self.engine, self.stats = engine, engine.stats()
            self.state = State.READY
            self._on_ready(engine)
            while self._take_commands(engine):
                if engine.has_work():
                    self._step(engine)
            self.state = State.STOPPED
        except BaseException as error:
            self.state = State.FAILED
            self._post(self.abort_all, "the engine has failed")
            self._on_failed(error)

    def _take_commands(self, engine: EngineLike) -> bool:
        """Runs every waiting command, waiting for one if the engine is idle. False: the thread has to end."""
        try:
            command = self._commands.get(block=not engine.has_work())
            while command is not None:
                command(engine)
                self.stats = engine.stats()
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _step(self, engine: EngineLike) -> None:
        try:
            events = engine.step()
            self._failed_steps = 0
        except Exception as error:
            log.exception("an engine step failed")
            events = self._fail(engine, error)
        self._live.difference_update(e.request_id for e in events if e.finish_reason)
        self.stats = engine.stats()
        if events:
            self._post(self._deliver, events)

    def _fail(self, engine: EngineLike, error: Exception) -> list[TokenEvent]:
        """Error events for the requests in the failed step: those the exception names, else all inside the engine."""
        self._failed_steps += 1
        ids = sorted(getattr(error, "request_ids", None) or self._live)
        for request_id in ids:
            with contextlib.suppress(Exception):
                engine.abort(request_id)
        message = "the engine failed while running this request; the server's log has the details"
        return [_error_event(i, FinishReason.ERROR, message) for i in ids]

    def _add(self, engine: EngineLike, requests: Sequence[Request], accepted: asyncio.Future[None]) -> None:
        added: list[str] = []
        try:
            for request in requests:
                engine.add(request)
                added.append(request.id)
        except Exception as error:
            for request_id in added:
                engine.abort(request_id)
            self._resolve(accepted, error=error)
            return
        self._live.update(added)
        self._resolve(accepted)

    def _abort(self, engine: EngineLike, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._live:
                self._live.discard(request_id)
                try:
                    engine.abort(request_id)
                except Exception:
                    log.exception("aborting request %s failed", request_id)

    def _resolve(self, future: asyncio.Future[Any], result: Any = None, error: Exception | None = None) -> None:
        def settle() -> None:
            if future.done():
                return  # its caller was cancelled
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._post(settle)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function, *args)


def _error_event(request_id: str, reason: FinishReason, message: str) -> TokenEvent:
    return TokenEvent(request_id, (), finish_reason=reason, error=message)
