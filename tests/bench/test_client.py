"""The client against a real HTTP server. Times are checked only where they cannot fail on a slow machine: a wait of
the server's is a lower bound of what the client measures."""

import asyncio

import pytest

from jaxsqueeze.bench import client
from jaxsqueeze.bench.client import Call, Target


def drive(server, calls, *, open_loop=False, api="completions", timeout=30.0, **kw):
    target = Target(server.url, "fake-model", api, timeout=timeout)
    return asyncio.run(client.drive(target, calls, open_loop=open_loop, **kw))


def test_chunks_and_usage_are_recorded(fake_server):
    (outcome,) = drive(fake_server, [Call(0.0, [1, 2, 3], 5)])
    assert outcome.error is None
    assert len(outcome.chunk_times) == 5
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (3, 5, 2)
    assert outcome.has_usage
    assert outcome.chunk_times[0] - outcome.begin >= fake_server.first_delay
    assert outcome.chunk_times[-1] - outcome.begin >= fake_server.first_delay + 4 * fake_server.gap
    assert list(outcome.chunk_times) == sorted(outcome.chunk_times)
    assert outcome.begin <= outcome.sent <= outcome.chunk_times[0] <= outcome.end


def test_the_request_asks_for_a_greedy_stream_with_usage(fake_server):
    drive(fake_server, [Call(0.0, [1, 2, 3], 5)])
    (body,) = fake_server.bodies
    assert body == {
        "model": "fake-model",
        "prompt": [1, 2, 3],
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_a_chat_role_chunk_is_not_the_first_token(fake_server):
    (outcome,) = drive(fake_server, [Call(0.0, "say x", 3)], api="chat")
    assert fake_server.bodies[0]["messages"] == [{"role": "user", "content": "say x"}]
    assert len(outcome.chunk_times) == 3
    assert outcome.chunk_times[0] - outcome.begin >= fake_server.first_delay


def test_usage_counts_tokens_when_chunks_carry_several(fake_server):
    fake_server.per_chunk = 4
    (outcome,) = drive(fake_server, [Call(0.0, [1], 8)])
    assert (len(outcome.chunk_times), outcome.output_tokens) == (2, 8)
    fake_server.usage = False
    (outcome,) = drive(fake_server, [Call(0.0, [1], 8)])
    assert (outcome.output_tokens, outcome.has_usage) == (2, False)


def test_open_loop_counts_from_the_due_time_even_when_the_client_queues(fake_server):
    calls = [Call(0.01 * i, [i + 1], 2) for i in range(4)]
    outcomes = drive(fake_server, calls, open_loop=True, max_in_flight=1)
    assert [o.begin for o in outcomes] == [0.0, 0.01, 0.02, 0.03]
    assert all(o.sent >= o.begin for o in outcomes)
    # One at a time: the last waited for three answers of two chunks each, and that wait is in its latency.
    assert outcomes[3].chunk_times[0] - outcomes[3].begin >= 4 * fake_server.first_delay + 3 * fake_server.gap - 0.03
    assert fake_server.most_running == 1


def test_closed_loop_keeps_a_fixed_number_in_flight_and_counts_from_sending(fake_server):
    done = []
    outcomes = drive(fake_server, [Call(0.0, [1], 2)] * 9, max_in_flight=3, on_done=done.append)
    assert fake_server.most_running == 3
    assert all(o.begin == o.sent for o in outcomes)
    assert max(o.begin for o in outcomes) > fake_server.first_delay
    assert len(done) == 9


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("refuse", "HTTP 400: too long"),
        ("error", "error in the stream: out of pages"),
        ("cut", "the stream ended without a finish_reason"),
    ],
)
def test_failures_are_outcomes_with_the_servers_words(fake_server, fault, says):
    fake_server.fault = fault
    (outcome,) = drive(fake_server, [Call(0.0, [1], 4)])
    assert outcome.error == says


def test_one_request_is_bounded_in_time_and_the_others_go_on(fake_server):
    fake_server.fault = "hang"
    slow, quick = drive(fake_server, [Call(0.0, [1], 4), Call(0.0, [1], 1)], timeout=0.5)
    assert slow.error == "no complete answer in 0.5 s"
    assert quick.error is None


def test_the_run_is_bounded_in_time(fake_server):
    fake_server.fault = "hang"
    outcomes = drive(fake_server, [Call(0.0, [1], 4), Call(500.0, [1], 1)], open_loop=True, max_seconds=0.5)
    assert [o.error for o in outcomes] == ["the run's limit of 0.5 s"] * 2
    assert all(o.end < 60 for o in outcomes)


def test_no_server_is_an_error_not_a_crash(fake_server, unused_port):
    (outcome,) = asyncio.run(
        client.drive(Target(f"http://127.0.0.1:{unused_port}", "m"), [Call(0.0, [1], 1)], open_loop=False)
    )
    assert outcome.error == "connection: ConnectError"
    with pytest.raises(ValueError, match="no server answers"):
        asyncio.run(client.discover_model(f"http://127.0.0.1:{unused_port}", None))


def test_an_answer_without_end_is_cut(fake_server, monkeypatch):
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 300)
    (outcome,) = drive(fake_server, [Call(0.0, [1], 400)])
    assert outcome.error.startswith("the answer is longer than")
    assert len(outcome.chunk_times) < 10


def test_url_with_v1_key_and_tokenizer(fake_server):
    fake_server.api_key = "k"
    assert asyncio.run(client.discover_model(f"{fake_server.url}/v1/", None)) == ("fake-model", 4096)
    keyed = Target(f"{fake_server.url}/v1", "fake-model", api_key="k")
    (outcome,) = asyncio.run(client.drive(keyed, [Call(0.0, [1], 1)], open_loop=False))
    assert outcome.error is None
    (outcome,) = drive(fake_server, [Call(0.0, [1], 1)])
    assert outcome.error == "HTTP 401: wrong key"
    assert asyncio.run(client.tokenize(keyed, ["one three", "four"])) == [3, 5, 4]
    fake_server.can_tokenize = False
    assert asyncio.run(client.tokenize(keyed, ["one three"])) is None
