"""Errors in the shape OpenAI clients parse: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxsqueeze.server.config import MAX_MESSAGE_CHARS
from jaxsqueeze.server.wire import json_response

log = logging.getLogger("jaxsqueeze.server")

_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "service_unavailable"}


class ApiError(Exception):
    """An answer other than 200. ``message`` tells the client what to change, or what to wait for."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        message = self.message
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[:MAX_MESSAGE_CHARS] + "..."
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(self.status)
        return json_response(self.body(), self.status, headers)


class BadRequest(ApiError):
    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


@contextlib.contextmanager
def client_fault(param: str | None = None) -> Iterator[None]:
    """A ValueError inside is the client's: 400 with its message."""
    try:
        yield
    except ValueError as error:
        raise BadRequest(str(error), param=param) from error


def install(app: FastAPI) -> None:
    """Every error of the app, its own or the framework's, leaves in the one shape."""

    async def ours(_request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def framework(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, str(error.detail)).response()

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(HTTPException, framework)
    app.add_middleware(LastResort)


class LastResort:
    """An exception that nobody expected: 500, and the connection stays usable for the client's next call."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if scope["type"] != "http" or started:
                raise  # a broken-off answer must look broken off
            log.exception("unexpected error in %s", scope["path"])
            error = ApiError(500, "internal error; the server's log has the details")
            await error.response()(scope, receive, send)
