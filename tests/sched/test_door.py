"""What is refused at the door, and that a refusal leaves no trace."""

from __future__ import annotations

import pytest

from jaxsqueeze.types import MAX_STOP_IDS, FinishReason, Request, RequestRefused, SamplingParams
from tests.sched.build_device import VOCAB, Harness
from tests.sched.build_traffic import FULL, check_result, window


def make_harness(groups=(FULL,), num_pages=(9,), **changes) -> Harness:
    sizes = {"max_slots": 4, "page_size": 16, "max_model_len": 1000, "max_step_tokens": 64, "decode_steps": 4}
    return Harness(groups=groups, num_pages=num_pages, **{**sizes, **changes})


def request(length: int, name: str = "r", **sampling) -> Request:
    return Request(name, tuple(5 + i % 40 for i in range(length)), SamplingParams(seed=1, **sampling))


def refused(harness: Harness, bad: Request, match: str) -> None:
    """The request is refused, nothing changed, and the next one runs."""
    before = harness.scheduler.stats()
    with pytest.raises(RequestRefused, match=match):
        harness.add(bad)
    assert harness.scheduler.stats() == before
    harness.scheduler.check_integrity()
    good = request(20, "good", max_tokens=3)
    harness.add(good)
    harness.drain()
    check_result(harness, good, 23)
    harness.check_idle()


def test_a_prompt_larger_than_the_pool_is_refused_and_the_next_request_is_served():
    # 8 blocks of 16, prompt 200: it fits max_model_len but never the pool.
    refused(make_harness(), request(200, max_tokens=1), "prompt has 200 tokens; the KV pool holds 128")


def test_prompt_and_max_tokens_larger_than_the_pool_are_refused_with_what_would_fit():
    refused(make_harness(), request(100, max_tokens=30), "max_tokens 29 would fit")
    harness = make_harness()
    harness.add(request(100, max_tokens=29, ignore_eos=True))
    harness.drain()
    assert len(harness.tokens("r")) == 29


def test_without_max_tokens_a_request_ends_where_the_pool_does():
    harness = make_harness()
    harness.add(request(100, ignore_eos=True))
    harness.drain()
    assert len(harness.tokens("r")) == 29
    assert harness.finish("r") is FinishReason.LENGTH


def test_a_small_window_pool_refuses_what_only_a_full_group_could_hold():
    # Window 20 and steps of 64: up to 7 pages at once. A pool of 6 holds 96 tokens before any page is freed.
    refused(make_harness((window(20),), (7,)), request(97, max_tokens=1), "pool holds 96")
    harness = make_harness((window(20),), (8,))
    harness.add(request(900, max_tokens=50, ignore_eos=True))
    harness.drain()
    assert len(harness.tokens("r")) == 50


def test_each_group_is_checked():
    refused(make_harness((FULL, window(20)), (9, 3)), request(40, max_tokens=1), "pool holds 32")
    refused(make_harness((FULL, window(20)), (3, 9)), request(40, max_tokens=1), "pool holds 32")


def test_a_prompt_of_max_model_len_is_refused_and_one_less_yields_one_token():
    refused(make_harness(max_model_len=64), request(64), "at most 63 fit in max_model_len 64")
    harness = make_harness(max_model_len=64)
    harness.add(request(63, ignore_eos=True))
    harness.drain()
    assert len(harness.tokens("r")) == 1
    assert harness.finish("r") is FinishReason.LENGTH


def test_full_pages_are_enough_for_a_prompt_that_fills_them():
    harness = make_harness(num_pages=(3,))
    harness.add(request(32, max_tokens=1, ignore_eos=True))
    harness.drain()
    assert len(harness.tokens("r")) == 1
    refused(make_harness(num_pages=(3,)), request(33, max_tokens=0), "pool holds 32")


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (request(0), "prompt is empty"),
        (Request("r", (1, VOCAB), SamplingParams()), f"prompt: token id {VOCAB} is outside the vocabulary"),
        (Request("r", (-1, 3), SamplingParams()), "prompt: token id -1 is outside"),
        (Request("r", (2**70,), SamplingParams()), "outside the vocabulary"),
        (request(3, stop_token_ids=(4, VOCAB)), "stop_token_ids: token id 48"),
        (request(3, stop_token_ids=(-7,)), "stop_token_ids: token id -7"),
        (request(3, logit_bias=((1, 0.5), (1000, 1.0))), "logit_bias: token id 1000"),
        (request(3, bad_words_ids=((1, 2), (3, 99))), "bad_words: token id 99"),
        (request(3, n=2), "n = 2"),
        (request(3, stop_token_ids=tuple(range(3, 3 + MAX_STOP_IDS - 1))), "33 stop ids"),
    ],
)
def test_bad_ids_are_refused(bad, match):
    refused(make_harness(), bad, match)


def test_stop_ids_count_once_and_only_if_they_are_used():
    harness = make_harness()
    harness.add(request(3, "same", stop_token_ids=tuple(range(1, 1 + MAX_STOP_IDS))))  # 1 and 2 are EOS already
    harness.add(request(3, "ignored", stop_token_ids=tuple(range(3, 3 + MAX_STOP_IDS)), ignore_eos=True))
    plan = harness.scheduler.plan()
    assert [len(admit.stop_ids) for admit in plan.admits] == [MAX_STOP_IDS, MAX_STOP_IDS]


def test_an_id_in_use_is_refused_until_its_request_ended():
    harness = make_harness()
    harness.add(request(3, max_tokens=2))
    with pytest.raises(RequestRefused, match="'r' is in use"):
        harness.add(request(4))
    harness.drain()
    harness.add(request(4, max_tokens=2))
    harness.drain()


def test_requests_without_a_seed_get_their_own_and_a_refusal_draws_none():
    def seeds(*, with_refusal: bool) -> list[int]:
        harness = make_harness()
        harness.add(Request("a", (5, 6), SamplingParams()))
        if with_refusal:
            with pytest.raises(RequestRefused):
                harness.add(Request("x", (), SamplingParams()))
        harness.add(Request("b", (5, 6), SamplingParams()))
        harness.add(Request("c", (5, 6), SamplingParams(seed=42)))
        return [admit.request.sampling.seed for admit in harness.scheduler.plan().admits]

    first = seeds(with_refusal=False)
    assert len(set(first)) == 3
    assert first[2] == 42
    assert seeds(with_refusal=True) == first
