"""``POST /start_profile`` and ``/stop_profile``: jax profiler traces of the running engine (XProf, Perfetto).

Both run on the engine's thread between two steps, so a trace holds whole steps.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxsqueeze.server.service import Service
from jaxsqueeze.server.wire import json_response

router = APIRouter()


@router.post("/start_profile")
async def start_profile(request: Request) -> Response:
    service: Service = request.app.state.service
    trace = await service.worker.call(lambda _engine: service.profiler.start())
    return json_response({"trace": str(trace)})


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    service: Service = request.app.state.service
    trace = await service.worker.call(lambda _engine: service.profiler.stop())
    return json_response({"trace": str(trace)})
