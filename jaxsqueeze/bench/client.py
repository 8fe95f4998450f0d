"""An open- or closed-loop client for any OpenAI-compatible server: sends prompts, records when each chunk arrived.

Open loop: every request is due at its arrival time, and its latencies count from then, so that a queue on the client's
side (``max_in_flight`` reached) is not hidden. Closed loop: ``max_in_flight`` requests are kept running, and latencies
count from sending. Everything is bounded: requests in flight, seconds a request and the whole run may take, and bytes
of one answer. The server's own token counts (``usage``) are asked for in the stream and used; nothing here knows
the engine or a tokenizer.

Times are seconds from the start of the run, monotonic clock.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

import httpx

from jaxsqueeze.bench.outcome import Outcome

MAX_ANSWER_BYTES = 64 << 20  # one streamed answer; a server that never stops must not fill the memory


@dataclasses.dataclass(frozen=True)
class Target:
    """Where and how to send. ``url`` is the server's root, with or without ``/v1``."""

    url: str
    model: str
    api: Literal["completions", "chat"] = "completions"
    api_key: str | None = None
    ignore_eos: bool = True  # not in OpenAI's API, but in most self-hosted servers: keeps output lengths as asked
    timeout: float = 600.0  # seconds one request may take

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, prompt: list[int] | str, max_tokens: int) -> dict[str, Any]:
        prompt_field = {"messages": [{"role": "user", "content": prompt}]} if self.api == "chat" else {"prompt": prompt}
        return {
            "model": self.model,
            **prompt_field,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }


@dataclasses.dataclass(frozen=True)
class Call:
    """One request to make: due at ``arrival`` (open loop; ignored in a closed loop)."""

    arrival: float
    prompt: list[int] | str
    max_tokens: int


async def drive(
    target: Target,
    calls: Sequence[Call],
    *,
    open_loop: bool,
    max_in_flight: int = 256,
    max_seconds: float = 3600.0,
    on_done: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Makes all calls and returns their outcomes in the same order. A call that fails is an outcome with ``error``."""
    gate = asyncio.Semaphore(max_in_flight)
    limits = httpx.Limits(max_connections=max_in_flight, max_keepalive_connections=max_in_flight)
    async with httpx.AsyncClient(headers=target.headers, limits=limits, timeout=None) as http:
        start = time.perf_counter()

        def now() -> float:
            return time.perf_counter() - start

        async def one(call: Call) -> Outcome:
            begin = sent = call.arrival if open_loop else 0.0
            try:
                async with asyncio.timeout(max_seconds - now()):
                    if open_loop:
                        await asyncio.sleep(call.arrival - now())
                    async with gate:
                        sent = now()
                        begin = call.arrival if open_loop else sent
                        outcome = await _send(http, target, call, begin, sent, now)
            except TimeoutError:
                outcome = Outcome(begin, sent, now(), error=f"the run's limit of {max_seconds:g} s")
            on_done(outcome)
            return outcome

        return list(await asyncio.gather(*(one(call) for call in calls)))


async def _send(
    http: httpx.AsyncClient, target: Target, call: Call, begin: float, sent: float, now: Callable[[], float]
) -> Outcome:
    """One streamed request, start to finish."""
    times: list[float] = []
    usage: dict[str, Any] = {}
    finished, error = False, None
    try:
        async with (
            asyncio.timeout(target.timeout),
            http.stream(
                "POST",
                f"{target.root}/v1/{'chat/completions' if target.api == 'chat' else 'completions'}",
                json=target.body(call.prompt, call.max_tokens),
            ) as response,
        ):
            if response.status_code != 200:
                raise _Failed(f"HTTP {response.status_code}: {_message(await response.aread())}")
            async for data in _events(response):
                arrived = now()
                if error_field := data.get("error"):
                    raise _Failed(f"error in the stream: {_brief(error_field)}")
                usage = data.get("usage") or usage
                for choice in data.get("choices") or ():
                    finished = finished or choice.get("finish_reason") is not None
                    # A last chunk with no text still stands for tokens if it is the only one.
                    if _has_text(choice) or (finished and not times):
                        times.append(arrived)
    except TimeoutError:  # this request's own limit; the run's arrives as a cancellation
        error = f"no complete answer in {target.timeout:g} s"
    except _Failed as failure:
        error = str(failure)
    except httpx.HTTPError as failure:
        error = f"connection: {type(failure).__name__}"
    if error is None and not finished:
        error = "the stream ended without a finish_reason"
    details = usage.get("prompt_tokens_details") or {}
    return Outcome(
        begin=begin,
        sent=sent,
        end=now(),
        chunk_times=tuple(times),
        prompt_tokens=usage.get("prompt_tokens", 0),
        output_tokens=usage.get("completion_tokens", len(times)),
        cached_tokens=details.get("cached_tokens") or 0,
        has_usage=bool(usage),
        error=error,
    )


class _Failed(Exception):
    """The server answered, but not with a usable answer."""


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON payloads of a server-sent event stream, up to ``[DONE]``."""
    size = 0
    async for line in response.aiter_lines():
        size += len(line)
        if size > MAX_ANSWER_BYTES:
            raise _Failed(f"the answer is longer than {MAX_ANSWER_BYTES >> 20} MiB")
        if not line.startswith("data:"):
            continue
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            return
        try:
            event = json.loads(payload)
        except ValueError as error:
            raise _Failed("a chunk is not JSON") from error
        if not isinstance(event, dict):
            raise _Failed("a chunk is not a JSON object")
        yield event


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice.get("message") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))


def _message(body: bytes) -> str:
    """The server's own sentence, out of the shapes servers use."""
    try:
        return _brief(json.loads(body))
    except ValueError:
        return _brief(body.decode("utf-8", "replace"))


def _brief(detail: Any) -> str:
    while isinstance(detail, dict) and (inner := detail.get("error") or detail.get("message") or detail.get("detail")):
        detail = inner
    return " ".join(str(detail).split())[:200]


async def discover_model(url: str, api_key: str | None) -> tuple[str, int | None]:
    """The first model the server lists, and the longest prompt plus output it takes if it says so (many do).

    Raises ValueError with a cure.
    """
    target = Target(url, model="", api_key=api_key)
    try:
        async with httpx.AsyncClient(headers=target.headers, timeout=30) as http:
            response = await http.get(f"{target.root}/v1/models")
            response.raise_for_status()
            first = response.json()["data"][0]
            return first["id"], first.get("max_model_len")
    except httpx.HTTPStatusError as error:
        raise ValueError(f"{target.root}/v1/models answered {error.response.status_code}; give --model") from error
    except httpx.HTTPError as error:
        raise ValueError(f"no server answers at {target.root} ({error or type(error).__name__})") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{target.root}/v1/models lists no model; give --model") from error


async def tokenize(target: Target, parts: Sequence[str]) -> list[int] | None:
    """Token ids of some texts, joined, by the server's own tokenizer; None where it offers none at ``/tokenize``."""
    ids: list[int] = []
    try:
        async with httpx.AsyncClient(headers=target.headers, timeout=60) as http:
            for part in parts:
                body = {"model": target.model, "prompt": part, "add_special_tokens": False}
                response = await http.post(f"{target.root}/tokenize", json=body)
                if response.status_code != 200:
                    return None
                ids += (int(x) for x in response.json()["tokens"])
    except (httpx.HTTPError, KeyError, TypeError, ValueError):
        return None
    return ids
