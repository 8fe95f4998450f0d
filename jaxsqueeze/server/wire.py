"""Bytes on the wire: strict JSON answers, server-sent events, and noticing that the client has gone.

JSON never carries NaN or Infinity (clients' parsers refuse them): ``dumps`` raises instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


async def gone(receive: Receive) -> None:
    """Returns when the client has disconnected. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientGone(Exception):
    """The client disconnected before its answer was ready."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``; cancels it and raises ClientGone if the client disconnects first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, watch)


class SseResponse(Response):
    """Streams events; ``close`` runs whatever happens: the end, a disconnect, even before the first event."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        watch = asyncio.create_task(gone(receive))
        try:
            await asyncio.wait({sending, watch}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _cancel(sending, watch)
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Answer(Protocol):
    """A reply that can be sent either way."""

    async def whole(self) -> dict[str, Any]: ...
    def chunks(self) -> AsyncIterator[bytes]: ...


async def respond(request: Request, answer: Answer, *, stream: bool, close: Callable[[], None]) -> Response:
    """Streams the answer or sends it whole. ``close`` runs at the end, also if the client disconnects (ClientGone)."""
    if stream:
        return SseResponse(answer.chunks(), close)
    try:
        return json_response(await unless_gone(request, answer.whole()))
    finally:
        close()


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
