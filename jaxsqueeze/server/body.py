"""A request body, from bytes to a checked model, under limits that hold before anything is built from it."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn, TypeVar

import pydantic
from starlette.requests import Request

from jaxsqueeze.server.config import MAX_BODY_DEPTH
from jaxsqueeze.server.errors import ApiError, BadRequest

Model = TypeVar("Model", bound=pydantic.BaseModel)


async def parse(request: Request, model: type[Model]) -> Model:
    """Raises ApiError: 413 for a body over the limit, 400 for anything else that is wrong with it."""
    data = decode(await _read(request, request.app.state.service.config.max_body_bytes))
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = [str(part) for part in first["loc"]]
        name = ".".join(where[:1]) or None
        message = first["msg"].removeprefix("Value error, ")  # pydantic's, before a sentence of ours
        raise BadRequest(": ".join(filter(None, (".".join(where[:4]), message))), param=name) from error


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes (see --max-body-bytes)")


def decode(raw: bytes) -> dict[str, Any]:
    """One JSON object: strict numbers, bounded nesting, no lone surrogates. Raises BadRequest."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # also bad UTF-8, and integers too long to convert
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    _check_tree(value, surrogates=b"\\u" in raw)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is too large a number")
    return value


def _check_tree(value: Any, surrogates: bool) -> None:
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_BODY_DEPTH:
            raise _too_deep()
        below: list[Any] = []
        for node in level:
            children = node
            if isinstance(node, dict):
                children = node.values()
                if surrogates:
                    for key in node:
                        _check_text(key)
            for child in children:
                if isinstance(child, dict | list):
                    below.append(child)
                elif surrogates and isinstance(child, str):
                    _check_text(child)
        level = below


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest("the body has a lone surrogate (half of a \\uXXXX pair)") from None


def _too_deep() -> BadRequest:
    return BadRequest(f"the body is nested more than {MAX_BODY_DEPTH} levels deep")
