"""Routes about the server itself: health, version, models, metrics, and its tokenizer."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from jaxsqueeze.config import KVDtypes
from jaxsqueeze.report.quality import render
from jaxsqueeze.server.body import parse
from jaxsqueeze.server.errors import client_fault
from jaxsqueeze.server.prompts import chat_prompt, off_loop
from jaxsqueeze.server.schema import DetokenizeRequest, TokenizeRequest
from jaxsqueeze.server.service import Service
from jaxsqueeze.server.wire import json_response

router = APIRouter()


def _service(request: Request) -> Service:
    return request.app.state.service


@router.get("/health")
async def health(request: Request) -> Response:
    """200 when requests are served, else 503 with the reason."""
    status = _service(request).status
    return json_response({"status": status}, 200 if status == "ready" else 503)


@router.get("/version")
async def version() -> Response:
    return json_response({"version": importlib.metadata.version("jaxsqueeze")})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(_service(request).metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    service = _service(request)
    return json_response({"object": "list", "data": [_card(service, name) for name in service.names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    service = _service(request)
    return json_response(_card(service, service.check_model(name)))


def _card(service: Service, name: str) -> dict[str, Any]:
    """OpenAI's fields and three of our own: the longest prompt plus output, how weights and KV are stored, and what
    converting cost in quality (null: no report is stored; KV that is narrowed when serving is not part of it)."""
    manifest, config = service.engine.manifest, service.engine.config
    k, v = (config.dtype if kind == "auto" else kind for kind in KVDtypes.parse(config.kv_dtype))
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "jaxsqueeze",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.engine.max_model_len,
        "quantisation": {"weights": manifest.weights, "k": k, "v": v},
        "quality": manifest.quality and render.headline_figures(manifest.quality),
    }


@router.post("/tokenize", openapi_extra={"requestBody": TokenizeRequest.openapi_body()})
async def tokenize(request: Request) -> Response:
    """Ids of a prompt (with its BOS) or of messages (as the chat route would send them to the model)."""
    service = _service(request)
    fields = await parse(request, TokenizeRequest)
    service.check_model(fields.model)
    with client_fault():
        if (fields.prompt is None) == (fields.messages is None):
            raise ValueError("send either prompt or messages")
        if fields.messages is not None:
            prompt = await chat_prompt(
                service,
                fields.messages,
                add_generation_prompt=fields.add_generation_prompt,
                continue_final_message=fields.continue_final_message,
                add_special_tokens=bool(fields.add_special_tokens),
                kwargs=fields.chat_template_kwargs,
            )
            ids = list(prompt.ids)
        else:
            text, special = fields.prompt or "", fields.add_special_tokens is not False
            ids = await off_loop(len(text), lambda: service.tokenizer.encode(text, special))
    body: dict[str, Any] = {"count": len(ids), "max_model_len": service.engine.max_model_len, "tokens": ids}
    if fields.return_token_strs:
        body["token_strs"] = [service.tokenizer.token_text(i) for i in ids]
    return json_response(body)


@router.post("/detokenize", openapi_extra={"requestBody": DetokenizeRequest.openapi_body()})
async def detokenize(request: Request) -> Response:
    """The text of ids, special tokens included."""
    service = _service(request)
    fields = await parse(request, DetokenizeRequest)
    service.check_model(fields.model)
    vocab_size = service.engine.model_config.vocab_size
    with client_fault("tokens"):
        for token in fields.tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(f"tokens: token id {token} is outside the vocabulary of {vocab_size}")
    return json_response({"prompt": service.tokenizer.decode(fields.tokens, skip_special_tokens=False)})
