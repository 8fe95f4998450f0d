"""A small real HTTP server that speaks just enough of the OpenAI API, with known chunks at known times."""

import asyncio
import json
import socket
import threading
import time

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse


class FakeServer:
    """Answers ``max_tokens`` chunks, ``per_chunk`` tokens each. ``fault`` chooses how answers go wrong.

    ``first_delay`` and ``gap``: seconds before the first chunk and between chunks, lower bounds of what is measured.
    """

    first_delay, gap = 0.03, 0.01

    def __init__(self):
        self.bodies = []
        self.running = self.most_running = 0
        self.reset()
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/tokenize")(self.tokenize)
        self.app.post("/v1/completions")(self.completions)
        self.app.post("/v1/chat/completions")(self.completions)

    def reset(self):
        self.fault = None
        self.usage = self.can_tokenize = True
        self.per_chunk = 1
        self.bodies.clear()
        self.most_running = 0
        self.api_key = None

    async def models(self):
        return {"object": "list", "data": [{"id": "fake-model", "max_model_len": 4096}]}

    async def tokenize(self, request: Request):
        if not self.can_tokenize:
            return JSONResponse({"detail": "Not Found"}, 404)
        return {"tokens": [len(word) for word in (await request.json())["prompt"].split()]}

    async def completions(self, request: Request):
        body = await request.json()
        self.bodies.append(body)
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": {"message": "wrong key"}}, 401)
        if self.fault == "refuse" and body["max_tokens"] > 1:
            return JSONResponse({"error": {"message": "too long", "type": "invalid_request_error"}}, 400)
        if self.fault == "strict" and "ignore_eos" in body:
            return JSONResponse({"error": {"message": "unknown field ignore_eos"}}, 400)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async for event in self.events(body):
                yield f"data: {json.dumps(event)}\n\n"
            if self.fault != "cut":
                yield "data: [DONE]\n\n"
        finally:
            self.running -= 1

    async def events(self, body):
        chat, count = "messages" in body, body["max_tokens"]
        if self.fault == "hang" and count > 1:
            await asyncio.sleep(60)

        def chunk(text, finish=None):
            return {"choices": [{"index": 0, **({"delta": {"content": text}} if chat else {"text": text}),
                                 "finish_reason": finish}]}  # fmt: skip

        if chat:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        await asyncio.sleep(self.first_delay)
        for i in range(0, count, self.per_chunk):
            if i:
                await asyncio.sleep(self.gap)
            if self.fault == "error" and i:
                yield {"error": {"message": "out of pages"}}
                return
            if self.fault == "cut" and i:
                return
            yield chunk("x" * min(self.per_chunk, count - i))
        yield chunk("", "length")
        if self.usage:
            prompt = body.get("prompt", "")
            tokens = len(prompt) if isinstance(prompt, list) else len(prompt.split())
            details = {"cached_tokens": 2}
            yield {"choices": [], "usage": {"prompt_tokens": tokens, "completion_tokens": count,
                                            "prompt_tokens_details": details}}  # fmt: skip


@pytest.fixture(scope="session")
def _running_server():
    fake = FakeServer()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(fake.app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield fake
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def fake_server(_running_server):
    """The server, behaving well."""
    _running_server.reset()
    return _running_server


@pytest.fixture
def unused_port():
    """A port where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]  # bound but not listening: connections are refused
