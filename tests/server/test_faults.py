"""One request's trouble is nobody else's: exceptions in a step, clients that go away, refusals, the engine's thread."""

import contextlib
import socket
import threading
import time

import httpx
import openai
import pytest

from jaxsqueeze.types import RequestRefused
from tests.server.scripted_engine import StepFault
from tests.server.wire_checks import eventually, metric, script, stream

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def in_background(function) -> tuple[threading.Thread, list]:
    results: list = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


class TestStepFailures:
    def fail_on(self, server, prompt: str, named: bool):
        tokenizer = server.engine.tokenizer

        def before(requests):
            bad = tuple(r.id for r in requests if tokenizer.decode(r.prompt_ids) == prompt)
            if bad:
                raise StepFault("planted", bad) if named else RuntimeError("planted")

        server.engine.before_step = before

    def test_a_named_request_ends_and_its_neighbour_does_not(self, server):
        server.engine.step_seconds = 0.01
        script(server, "good", *"abcdefgh")
        thread, results = in_background(lambda: server.complete("good", max_tokens=50))
        eventually(lambda: server.engine.seen)
        self.fail_on(server, "bad", named=True)
        response = server.post(COMPLETIONS, prompt="bad", max_tokens=5)
        assert response.status_code == 500
        error = response.json()["error"]
        assert error["type"] == "server_error"
        assert "planted" not in error["message"]  # internals stay in the log
        thread.join()
        assert results[0]["choices"][0]["text"] == "abcdefgh"
        assert not server.engine.has_work()

    def test_without_names_the_step_s_requests_end_and_the_worker_goes_on(self, server):
        self.fail_on(server, "bad", named=False)
        assert server.post(COMPLETIONS, prompt="bad", max_tokens=5).status_code == 500
        server.complete("good", max_tokens=1)

    def test_streaming_error_is_an_event_in_the_error_shape(self, server):
        script(server, "bad", "a", "b")
        calls = []

        def before(requests):
            calls.append(1)
            if len(calls) == 2:
                raise StepFault("planted", tuple(r.id for r in requests))

        server.engine.before_step = before
        events = stream(server, prompt="bad", max_tokens=5)
        assert events[0]["choices"][0]["text"] == "a"
        assert events[-1]["error"]["type"] == "server_error"
        calls.clear()
        server.engine.before_step = before
        with pytest.raises(openai.APIError):
            list(server.openai.completions.create(model="scripted", prompt="bad", stream=True))

    def test_one_choice_of_several_fails_the_call_and_frees_the_others(self, server):
        script(server, "good", *(["a"] * 100))

        def before(requests):
            bad = tuple(r.id for r in requests if server.engine.tokenizer.decode(r.prompt_ids) == "bad")
            if bad:
                raise StepFault("planted", bad)

        server.engine.before_step = before
        server.engine.step_seconds = 0.005
        assert server.post(COMPLETIONS, prompt=["good", "bad"], max_tokens=100).status_code == 500
        eventually(lambda: not server.engine.has_work())

    def test_health_fails_while_every_step_does_and_recovers(self, start):
        running = start()

        def broken(_requests):
            raise RuntimeError("planted")

        running.engine.before_step = broken
        for _ in range(3):
            assert running.post(COMPLETIONS, prompt="a").status_code == 500
        assert running.http.get("/health").json() == {"status": "failing"}
        assert running.http.get("/health").status_code == 503
        running.engine.before_step = lambda requests: None
        running.complete("a", max_tokens=1)
        assert running.http.get("/health").status_code == 200

    def test_health_fails_while_the_engine_itself_counts_failed_steps(self, start):
        running = start()
        running.engine.failed_steps = 3
        assert running.http.get("/health").json() == {"status": "failing"}
        running.engine.failed_steps = 2
        assert running.http.get("/health").status_code == 200

    def test_an_unexpected_exception_in_add_is_500_in_the_error_shape(self, server):
        def broken(request):
            server.engine.before_add = lambda request: None
            raise KeyError("planted")

        server.engine.before_add = broken
        assert "planted" not in server.refused(COMPLETIONS, 500, prompt="a")["message"]

    def test_an_engine_that_breaks_outside_a_step_ends_the_server_not_in_silence(self, start):
        running = start()
        running.engine.step_seconds = 0.02
        thread, results = in_background(lambda: running.post(COMPLETIONS, prompt="a", max_tokens=100))
        eventually(lambda: running.engine.has_work())

        def broken():
            raise RuntimeError("planted")

        running.engine.before_stats = broken
        thread.join(10)
        assert results[0].status_code == 503
        assert running.http.get("/health").json() == {"status": "failed"}


class TestRefusals:
    def test_engine_s_refusal_is_400_even_when_streaming(self, server):
        for streamed in (False, True):
            server.engine.before_add = self.refuse
            response = server.post(COMPLETIONS, prompt="a", stream=streamed)
            server.engine.before_add = lambda request: None
            assert "max_tokens 5 would fit" in server.survives(response)["message"]

    @staticmethod
    def refuse(_request):
        raise RequestRefused("the pool holds 10: max_tokens 5 would fit")

    def test_all_choices_or_none(self, server):
        def third(request):
            if len(server.engine.seen) == 2:
                raise RequestRefused("no more")

        server.engine.before_add = third
        assert server.post(COMPLETIONS, prompt="a", n=3).status_code == 400
        server.engine.before_add = lambda request: None
        assert not server.engine.has_work()
        assert len(server.engine.aborted) == 2


class TestDisconnects:
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    @pytest.mark.parametrize("streamed", [False, True])
    def test_a_client_that_goes_away_frees_its_slot_within_a_step_or_two(self, server, path, streamed):
        server.engine.step_seconds = 0.02
        body = {"stream": streamed, "max_tokens": 100, "n": 2}
        body |= {"prompt": "p"} if path == COMPLETIONS else {"messages": USER}
        client = httpx.Client(base_url=server.url)
        request = client.build_request("POST", path, json=body)
        steps = server.engine.steps
        if streamed:
            response = client.send(request, stream=True)
            next(response.iter_lines())
            response.close()
        else:
            host, port = server.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as sock:
                head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request.content)}\r\n\r\n"
                sock.sendall(head.encode() + request.content)
                eventually(lambda: server.engine.steps >= steps + 2)
        before = server.engine.steps
        eventually(lambda: not server.engine.has_work())
        assert server.engine.steps - before <= 3
        assert len(server.engine.aborted) == 2
        server.complete("ok", max_tokens=1)

    def test_going_away_before_the_first_token(self, server):
        hold = threading.Event()
        server.engine.before_step = lambda requests: hold.wait(5)
        client = httpx.Client(base_url=server.url, timeout=0.1)
        with pytest.raises(httpx.TimeoutException):
            client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 100})
        with pytest.raises(httpx.TimeoutException):
            client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 100, "stream": True})
        client.close()
        time.sleep(0.05)
        hold.set()
        eventually(lambda: not server.engine.has_work() and len(server.engine.aborted) >= 1)
        server.complete("ok", max_tokens=1)

    def test_many_at_random(self, server):
        """Clients that leave at any moment leave nothing behind."""
        server.engine.step_seconds = 0.002

        def leave(delay: float) -> None:
            with contextlib.suppress(httpx.TimeoutException):
                httpx.post(server.url + COMPLETIONS, json={"prompt": "a", "max_tokens": 120}, timeout=delay)

        threads = [threading.Thread(target=leave, args=(0.002 * (i + 1),)) for i in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        eventually(lambda: not server.engine.has_work())
        eventually(lambda: server.service.worker.num_unfinished == 0)
        server.engine.step_seconds = 0
        server.complete("ok", max_tokens=1)


def test_the_engine_is_only_called_on_one_thread(server):
    server.engine.threads.clear()
    server.complete("a", max_tokens=2)
    stream(server, prompt="a", stop="zzz", max_tokens=3)
    server.post(COMPLETIONS, prompt="a" * 3000)
    assert len(server.engine.threads) == 1
    assert threading.get_ident() not in server.engine.threads


class TestMetrics:
    def test_counts(self, start):
        running = start()
        script(running, "hello", "ab", "c")
        running.complete("hello", max_tokens=9)
        running.complete("x", max_tokens=2)
        assert metric(running, "request_success_total", finished_reason="stop") == 1
        assert metric(running, "request_success_total", finished_reason="length") == 1
        assert metric(running, "prompt_tokens_total") == 2
        assert metric(running, "generation_tokens_total") == 4 + 2
        assert metric(running, "time_to_first_token_seconds_count") == 2
        assert metric(running, "inter_token_latency_seconds_count") == (4 - 2) + 1  # the first step's come together
        assert metric(running, "request_time_per_output_token_seconds_count") == 2
        assert metric(running, "e2e_request_latency_seconds_count") == 2
        assert metric(running, "request_generation_tokens_sum") == 6

    def test_compilations_after_ready_show(self, start):
        running = start()
        assert metric(running, "compilations_total") == 0
        running.engine.compiles_since_ready = 2
        assert metric(running, "compilations_total") == 2

    def test_gauges_follow_the_engine(self, start):
        running = start()
        hold = threading.Event()
        running.engine.before_step = lambda requests: running.engine.steps < 2 or hold.wait(10)
        threads = [in_background(lambda: running.complete("a", max_tokens=3))[0] for _ in range(6)]
        eventually(lambda: running.engine.steps >= 2)
        eventually(lambda: metric(running, "num_requests_running") >= 1)
        assert metric(running, "kv_cache_usage_perc") > 0
        assert metric(running, "page_tail_waste_ratio") == pytest.approx(8 / 24)
        hold.set()
        for thread in threads:
            thread.join()
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert metric(running, name) == 0
        assert metric(running, "request_success_total", finished_reason="length") == 6

    def test_aborts_count_once_and_gauges_return_to_zero(self, start):
        running = start()
        running.engine.step_seconds = 0.01
        body = {"prompt": "a", "max_tokens": 120}
        with httpx.stream("POST", running.url + COMPLETIONS, json={**body, "stream": True}) as response:
            next(response.iter_lines())
        with pytest.raises(httpx.TimeoutException):
            httpx.post(running.url + COMPLETIONS, json=body, timeout=0.1)
        eventually(lambda: not running.engine.has_work())
        eventually(lambda: metric(running, "request_success_total", finished_reason="abort") == 2)
        eventually(lambda: metric(running, "num_requests_running") == 0)
        assert metric(running, "request_success_total", finished_reason="stop") == 0

    def test_stop_strings_count_as_stop_not_abort(self, start):
        running = start()
        running.engine.step_seconds = 0.01
        script(running, "p", "aS", *["b"] * 50)
        running.complete("p", stop="S", max_tokens=60)
        eventually(lambda: not running.engine.has_work())
        assert metric(running, "request_success_total", finished_reason="stop") == 1
        assert metric(running, "request_success_total", finished_reason="abort") == 0
        assert metric(running, "generation_tokens_total") == 2

    def test_two_apps_have_their_own_registries(self, start):
        first, second = start(), start()
        first.complete("a", max_tokens=1)
        assert metric(first, "generation_tokens_total") == 1
        assert metric(second, "generation_tokens_total") == 0
