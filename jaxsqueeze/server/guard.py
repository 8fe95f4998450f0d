"""What every call passes first: the API key, and whether the server takes calls now. Pure ASGI, so streams and
disconnects pass through untouched."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxsqueeze.server.errors import ApiError
from jaxsqueeze.server.service import Service

# For load balancers and monitors; nothing here runs a model or tells what is asked of it.
OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})


class Guard:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._keys = [key.encode() for key in service.config.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        if scope["method"] == "OPTIONS":
            # Browsers send preflights without credentials; CORS, if allowed, has answered before this.
            return await Response(status_code=204, headers={"Allow": "GET, POST, OPTIONS"})(scope, receive, send)
        try:
            self._check_key(Headers(scope=scope).get("authorization", ""))
            self._service.check_open()
        except ApiError as error:
            return await error.response()(scope, receive, send)
        return await self._app(scope, receive, send)

    def _check_key(self, authorization: str) -> None:
        if not self._keys:
            return
        scheme, _, given = authorization.partition(" ")
        # Every key is compared, in constant time, whatever matches. Headers are bytes, decoded as Latin-1.
        matches = [hmac.compare_digest(key, given.strip().encode("latin-1")) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(401, "missing or wrong API key: send 'Authorization: Bearer <key>'", code="invalid_api_key")
