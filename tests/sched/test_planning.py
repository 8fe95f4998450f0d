"""What a step holds: who gets how many tokens, who is admitted, who is preempted."""

from __future__ import annotations

import numpy as np
import pytest

from jaxsqueeze.types import FinishReason, Request, SamplingParams, StepPlan
from tests.sched.build_device import Harness
from tests.sched.build_traffic import FULL, check_result, window


def make_harness(groups=(FULL,), num_pages=(65,), **changes) -> Harness:
    sizes = {"max_slots": 4, "page_size": 4, "max_model_len": 200, "max_step_tokens": 16, "decode_steps": 4}
    return Harness(groups=groups, num_pages=num_pages, **{**sizes, **changes})


def request(name: str, length: int, max_tokens: int = 20, *, priority=0, arrival=0.0, **sampling) -> Request:
    prompt = tuple(5 + (i * 7 + len(name)) % 40 for i in range(length))
    params = SamplingParams(max_tokens=max_tokens, seed=length, ignore_eos=True, **sampling)
    return Request(name, prompt, params, priority, arrival)


def chunk_runs(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.request_id, chunk.start, len(chunk.token_ids)) for chunk in plan.chunks]


def plans_until_idle(harness: Harness) -> list[StepPlan]:
    harness.drain()
    harness.check_idle()
    return harness.plans


# Chunks


def test_a_long_prompt_is_cut_at_page_borders_and_neighbours_share_the_budget():
    harness = make_harness(max_step_tokens=18)
    harness.add(request("a", 21))
    harness.add(request("b", 9))
    harness.add(request("c", 3))
    plans = [harness.scheduler.plan() for _ in range(3)]
    assert chunk_runs(plans[0]) == [("a", 0, 16)]  # 18 is not a page border, and the 2 tokens left are no page
    assert chunk_runs(plans[1]) == [("a", 16, 5), ("b", 0, 9), ("c", 0, 3)]
    assert [chunk.sample for chunk in plans[1].chunks] == [True, True, True]
    assert plans[0].chunks[0].sample is False
    assert plans[2].kind == "decode"
    assert plans[2].decode_request_ids == ("a", "b", "c")
    assert plans[2].decode_context.tolist() == [21, 9, 3]


def test_what_is_half_prefilled_goes_before_what_waits_even_with_a_better_priority():
    harness = make_harness()
    harness.add(request("long", 40))
    assert chunk_runs(harness.scheduler.plan()) == [("long", 0, 16)]
    harness.add(request("urgent", 12, priority=-5))
    assert chunk_runs(harness.scheduler.plan()) == [("long", 16, 16)]
    assert chunk_runs(harness.scheduler.plan()) == [("long", 32, 8), ("urgent", 0, 8)]


def test_priority_then_arrival_then_order():
    harness = make_harness(max_slots=1)
    for name, priority, arrival in [("d", 1, 0.0), ("c", 0, 2.0), ("a", 0, 1.0), ("b", 0, 1.0), ("first", -1, 9.0)]:
        harness.add(request(name, 3, 1, priority=priority, arrival=arrival))
    plans = plans_until_idle(harness)
    assert [admit.request.id for plan in plans for admit in plan.admits] == ["first", "a", "b", "c", "d"]


def test_decoding_rows_ride_along_with_a_prefill_one_token_a_step():
    harness = make_harness()
    harness.add(request("short", 3, 8))
    harness.step()
    harness.add(request("long", 60, 1))
    for _ in range(4):
        harness.step()
    mixed = harness.plans[1:5]
    assert [len(plan.chunks) for plan in mixed] == [1, 1, 1, 1]
    assert all(plan.kind == "mixed" and plan.num_steps == 1 for plan in mixed)
    assert [plan.decode_context.tolist() for plan in mixed] == [[3], [4], [5], [6]]


def test_deterministic_chunks_do_not_depend_on_neighbours():
    def runs(neighbours: bool) -> list[tuple[str, int, int]]:
        harness = make_harness(deterministic=True, max_step_tokens=18)
        if neighbours:
            harness.add(request("x", 5))
        harness.add(request("a", 37))
        if neighbours:
            harness.add(request("y", 22))
        return [run for plan in plans_until_idle(harness) for run in chunk_runs(plan) if run[0] == "a"]

    assert runs(neighbours=False) == runs(neighbours=True) == [("a", 0, 16), ("a", 16, 16), ("a", 32, 5)]


# Decode steps


def test_nobody_waits_so_rows_run_several_steps_up_to_the_longest_one_left():
    harness = make_harness()
    harness.add(request("a", 3, 4))
    harness.add(request("b", 5, 9))
    plans = plans_until_idle(harness)
    # After the prefill's own token: a has 3 left, b has 8.
    assert [(plan.num_steps, plan.decode_request_ids) for plan in plans[1:]] == [(4, ("a", "b")), (4, ("b",))]
    harness.add(request("c", 5, 7))
    assert [plan.num_steps for plan in plans_until_idle(harness)[3:]] == [1, 4, 2]


def test_one_step_at_a_time_while_somebody_waits():
    harness = make_harness(max_slots=1)
    harness.add(request("a", 3, 4))
    harness.add(request("b", 3, 4))
    plans = plans_until_idle(harness)
    assert [plan.num_steps for plan in plans if plan.decode_request_ids == ("a",)] == [1, 1, 1]
    assert [plan.num_steps for plan in plans if plan.decode_request_ids == ("b",)] == [3]


def test_scarce_pages_shorten_the_run_instead_of_preempting():
    harness = make_harness(num_pages=(4,), decode_steps=8)
    harness.add(request("a", 3, 5))
    harness.add(request("b", 3, 3))
    plans = plans_until_idle(harness)
    # Two rows at position 3 with 3 pages: 2 steps or more would need 2 more pages, one step needs none.
    assert plans[1].num_steps == 1
    assert harness.scheduler.stats().preemptions == 0


def test_no_row_is_planned_past_max_model_len():
    harness = make_harness(max_model_len=10, decode_steps=8)
    harness.add(request("a", 4, 100))
    plans_until_idle(harness)
    assert len(harness.tokens("a")) == 6
    assert harness.finish("a") is FinishReason.LENGTH


def test_decode_rows_are_in_slot_order():
    harness = make_harness()
    for name, priority in [("a", 3), ("b", 2), ("c", 1)]:
        harness.add(request(name, 3, priority=priority))
        harness.step()
    plan = harness.scheduler.plan()
    assert plan.decode_slots.tolist() == [0, 1, 2]
    assert plan.decode_request_ids == ("a", "b", "c")


# Admission


def test_admission_keeps_a_page_of_headroom_for_each_running_row():
    harness = make_harness(num_pages=(7,))
    harness.add(request("a", 12, 4))  # 3 of 6 pages
    harness.step()
    harness.add(request("b", 12, 4))  # 3 pages are free, but one of them is a's to grow
    assert harness.scheduler.plan().kind == "decode"
    assert harness.scheduler.stats().waiting == 1


def test_admission_counts_the_pages_that_half_done_prefills_still_need():
    harness = make_harness(num_pages=(17,))
    harness.add(request("a", 40, 4))
    harness.add(request("b", 40, 4))
    plans = plans_until_idle(harness)
    assert harness.scheduler.stats().preemptions == 0
    starts = [index for index, plan in enumerate(plans) if plan.admits]
    ends = [index for index, plan in enumerate(plans) if "a" in plan.decode_request_ids]
    assert starts[1] > ends[-1]


def test_a_small_prompt_does_not_take_pages_promised_to_a_half_done_prefill():
    harness = make_harness(num_pages=(12,), max_step_tokens=18)
    harness.add(request("a", 40, 1))  # 16 of its 40 tokens now: 4 of its 10 pages, 7 are free
    harness.add(request("b", 2, 1))  # would fit into the 2 tokens of budget and the free pages
    assert chunk_runs(harness.scheduler.plan()) == [("a", 0, 16)]


def test_nobody_overtakes_the_first_of_the_queue():
    harness = make_harness(num_pages=(11,))
    harness.add(request("running", 20, 16))
    harness.step()
    harness.add(request("large", 36, 1, arrival=1.0))
    harness.add(request("small", 1, 1, arrival=2.0))
    order = [admit.request.id for plan in plans_until_idle(harness) for admit in plan.admits]
    assert order == ["running", "large", "small"]


def test_slot_and_pages_are_free_as_soon_as_the_last_step_is_planned():
    harness = make_harness(max_slots=1)
    harness.add(request("a", 8, 1))
    harness.add(request("b", 8, 1))
    first, second = harness.scheduler.plan(), harness.scheduler.plan()
    assert [admit.request.id for admit in second.admits] == ["b"]
    assert second.admits[0].slot == first.admits[0].slot
    assert first.tables[0].table[0].any()  # the plan's own snapshot keeps them


# Preemption


def test_the_worst_row_is_preempted_and_continues_with_the_same_tokens():
    harness = make_harness(num_pages=(9,), decode_steps=1)
    requests = [
        request("good", 10, 16),
        request("bad", 6, 16, priority=1),
        request("mid", 3, 9, priority=0, arrival=1.0),
    ]
    for one in requests:
        harness.add(one)
    plans = plans_until_idle(harness)
    for one in requests:
        check_result(harness, one, len(one.prompt_ids) + one.sampling.max_tokens)
    again = [admit for plan in plans for admit in plan.admits if len(admit.output_ids)]
    assert {admit.request.id for admit in again} == {"bad"}
    for admit in again:
        assert admit.output_ids.tolist() == harness.tokens("bad")[: len(admit.output_ids)]
        assert admit.prompt_ids.tolist() == list(requests[1].prompt_ids)


def test_a_preempted_request_goes_before_later_arrivals():
    harness = make_harness(num_pages=(9,), decode_steps=1, max_slots=2)
    harness.add(request("a", 12, 20))
    harness.add(request("b", 8, 20, arrival=1.0))
    harness.run_until(lambda: harness.scheduler.stats().preemptions > 0)
    harness.add(request("later", 1, 1, arrival=2.0))
    order = [admit.request.id for plan in plans_until_idle(harness) for admit in plan.admits]
    assert order[-1] == "later"
    assert order.count("a") == 1


def test_the_worst_row_sits_out_a_step_rather_than_preempt_a_better_one():
    harness = make_harness(num_pages=(6,), decode_steps=1)
    harness.add(request("a", 12, 5))  # 3 of 5 pages, and a fourth for its first decode step
    harness.add(request("b", 2, 4, arrival=1.0))  # the fifth; it needs another at position 4
    plans = plans_until_idle(harness)
    assert [plan.decode_request_ids for plan in plans[1:]] == [("a", "b"), ("a", "b"), ("a",), ("a",), ("b",)]
    assert harness.scheduler.stats().preemptions == 0
    assert (len(harness.tokens("a")), len(harness.tokens("b"))) == (5, 4)


def test_a_preempted_request_is_admitted_again_only_when_its_last_tokens_are_known():
    harness = make_harness(num_pages=(9,), decode_steps=1, lag=2)
    harness.add(request("a", 12, 20))
    harness.add(request("b", 8, 20, arrival=1.0))
    harness.drain()
    committed = 0
    for plan in harness.plans:  # what b had sampled when it left is exactly what it brings back
        for admit in plan.admits:
            if admit.request.id == "b":
                assert len(admit.output_ids) == committed
        committed += "b" in plan.decode_request_ids
        committed += sum(chunk.request_id == "b" and chunk.sample for chunk in plan.chunks)
    assert harness.scheduler.stats().preemptions > 0


def test_a_preempted_request_that_ends_in_flight_is_not_admitted_again():
    harness = make_harness(num_pages=(9,), decode_steps=1)
    harness.add(request("a", 12, 20))
    harness.add(request("b", 8, 20, arrival=1.0))
    harness.run_until(lambda: harness.scheduler.stats().preemptions > 0)
    assert harness.device.plans, "b's last token is in flight"
    harness.device.poison.add("b")
    harness.drain()
    harness.check_idle()
    assert harness.finish("b") is FinishReason.ERROR
    assert len(harness.tokens("a")) == 20


# Cache groups


@pytest.mark.parametrize("groups", [(FULL, window(6)), (window(6),), (window(6), window(11))])
def test_long_outputs_live_in_a_window_pool_that_holds_only_windows(groups):
    full_pages = 60
    widths = make_harness(groups, (full_pages,) * len(groups)).scheduler.table_widths()
    pages = tuple(full_pages if group.window is None else 1 + 2 * w for group, w in zip(groups, widths, strict=True))
    harness = make_harness(groups, pages)
    requests = [request("a", 70, 50), request("b", 33, 80)]
    for one in requests:
        harness.add(one)
    plans = plans_until_idle(harness)
    for one in requests:
        check_result(harness, one, len(one.prompt_ids) + one.sampling.max_tokens)
    assert harness.scheduler.stats().preemptions == 0
    for index, width in enumerate(widths):
        assert all(plan.tables[index].table.shape == (5, width) for plan in plans)


def test_pages_are_reserved_in_all_groups_or_none():
    # Enough pages in the full group, too few in the other: the worst row must not keep half of what it needs.
    harness = make_harness((FULL, window(40)), (60, 9), decode_steps=1)
    harness.add(request("a", 16, 16))
    harness.add(request("b", 8, 16, arrival=1.0))
    harness.drain()
    harness.check_idle()
    assert harness.scheduler.stats().preemptions > 0
    assert len(harness.tokens("a")) == len(harness.tokens("b")) == 16


def test_stats_count_tokens_and_page_tails():
    harness = make_harness((FULL, window(5)), (30, 30))
    harness.add(request("a", 10, 20))
    harness.add(request("b", 20, 20))
    harness.scheduler.plan()
    stats = harness.scheduler.stats()
    assert (stats.running, stats.waiting, stats.preemptions) == (2, 0, 0)
    assert stats.pages_total == (29, 29)
    assert stats.pages_used == (4, 4)  # 10 tokens in 3 pages, and the 4 tokens of b that the budget left
    assert stats.live_tokens == (14, 14)
    assert stats.tail_tokens == (2, 2)
    assert stats.page_tail_waste == pytest.approx(4 / 28)
    harness.scheduler.plan()
    stats = harness.scheduler.stats()
    # a decodes position 10 in its third page: its window 6..10 starts in page 1. b: tokens 4..19, query 4 sees 0..4.
    assert stats.pages_used == (3 + 5, 2 + 5)
    assert stats.live_tokens == (11 + 20, 7 + 20)
    assert stats.tail_tokens == (1, 1)


def test_an_empty_scheduler_has_nothing_to_do():
    harness = make_harness()
    assert harness.scheduler.plan() is None
    assert not harness.scheduler.has_work()
    assert harness.scheduler.stats().page_tail_waste == 0
    harness.add(request("a", 3, 1))
    assert harness.scheduler.has_work()
    plan = harness.scheduler.plan()
    assert plan.decode_slots.dtype == plan.decode_context.dtype == plan.chunks[0].token_ids.dtype == np.int32
    assert harness.scheduler.plan() is None
    assert harness.scheduler.has_work()
