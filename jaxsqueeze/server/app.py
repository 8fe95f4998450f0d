"""The FastAPI application: routes, guard and errors put together around one worker."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from jaxsqueeze.server import chat, completions, errors, info, profiling
from jaxsqueeze.server.guard import Guard
from jaxsqueeze.server.service import Service
from jaxsqueeze.server.wire import ClientGone
from jaxsqueeze.server.worker import State

STOP_SECONDS = 5.0  # wait for the engine's current step at exit


def create_app(service: Service) -> FastAPI:
    """The worker's thread starts and ends with the app."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        # A thread that still compiles cannot be stopped: the process ends under it.
        service.worker.stop(0.0 if service.worker.state is State.STARTING else STOP_SECONDS)

    app = FastAPI(title="JaxSqueeze", lifespan=lifespan)
    app.state.service = service
    app.add_exception_handler(ClientGone, _nobody_listens)
    for module in (chat, completions, info, profiling):
        app.include_router(module.router)
    app.add_middleware(Guard, service=service)
    errors.install(app)
    if service.config.allowed_origin:
        # Added last, so outermost: a preflight is answered before the guard asks for a key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.config.allowed_origin),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


async def _nobody_listens(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # for the access log: the client closed the connection
