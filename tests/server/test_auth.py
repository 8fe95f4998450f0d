"""API keys guard every route but the monitors' ones; preflights pass."""

import pytest

from jaxsqueeze.server.app import create_app
from jaxsqueeze.server.config import ServerConfig
from jaxsqueeze.server.guard import OPEN_PATHS
from tests.server.running import run_server, wait_ready
from tests.server.scripted_engine import ScriptedEngine

KEYS = ("first-key", "second-kéy")


@pytest.fixture(scope="module")
def guarded(tokenizer):
    running = wait_ready(run_server(ScriptedEngine(tokenizer), ServerConfig(port=0, api_key=KEYS)))
    yield running
    running.stop()


def every_route(running) -> list[tuple[str, str]]:
    """Read from the app, so that a new route cannot be forgotten."""
    paths = create_app(running.service).openapi()["paths"]
    return [(path.replace("{name}", "x"), method.upper()) for path, methods in paths.items() for method in methods]


def test_every_route_but_the_open_ones_needs_a_key(guarded):
    routes = every_route(guarded)
    assert ("/v1/completions", "POST") in routes
    assert ("/start_profile", "POST") in routes
    others = [("/docs", "GET"), ("/openapi.json", "GET"), ("/invocations", "POST"), ("//v1/completions", "POST")]
    for path, method in [*routes, *others]:
        response = guarded.http.request(method, guarded.url + path, content=b"{}")
        if path in OPEN_PATHS:
            assert response.status_code == 200
        else:
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "header",
    ["Bearer wrong", "Bearer", "first-key", "Basic first-key", "Bearer first-key2", "Bearer first"],
)
def test_wrong_keys(guarded, header):
    assert guarded.http.get("/v1/models", headers={"Authorization": header}).status_code == 401


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_key_opens(guarded, key, scheme):
    header = {"Authorization": f"{scheme} {key}".encode()}
    assert guarded.http.get("/v1/models", headers=header).status_code == 200


def test_preflight_is_not_asked_for_a_key(guarded):
    response = guarded.http.options("/v1/chat/completions", headers={"Origin": "http://a", "X": "y"})
    assert response.status_code == 204
    assert "POST" in response.headers["allow"]
    assert "access-control-allow-origin" not in response.headers  # CORS is off unless asked for


def test_cors_for_the_allowed_origin_only(start):
    running = start(config=ServerConfig(port=0, api_key=("k",), allowed_origin=("http://page",)))
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    yes = running.http.options("/v1/completions", headers={"Origin": "http://page", **ask})
    assert yes.status_code == 200
    assert yes.headers["access-control-allow-origin"] == "http://page"
    no = running.http.options("/v1/completions", headers={"Origin": "http://other", **ask})
    assert "access-control-allow-origin" not in no.headers
    assert running.http.get("/v1/models", headers={"Origin": "http://page"}).status_code == 401


def test_no_key_no_guard(server):
    assert server.http.get("/v1/models").status_code == 200
