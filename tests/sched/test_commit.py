"""What tokens mean: stops inside a step, minimum lengths, log-probabilities, aborts, failures."""

from __future__ import annotations

import numpy as np
import pytest

from jaxsqueeze.sched import Scheduler
from jaxsqueeze.types import FinishReason, Logprob, LogprobArrays, Request, SamplingParams, StepOutput, StepPlan
from tests.sched.build_device import Harness, prompt_scores
from tests.sched.build_traffic import FULL, check_result, window


def make_scheduler(*, eos: tuple[int, ...] = (2,), **changes) -> Scheduler:
    sizes = {"max_slots": 4, "page_size": 4, "max_model_len": 64, "max_step_tokens": 16, "decode_steps": 4}
    return Scheduler(groups=(FULL,), num_pages=(40,), eos_token_ids=eos, vocab_size=1000, **{**sizes, **changes})


def request(name: str = "r", length: int = 3, **sampling) -> Request:
    return Request(name, tuple(range(10, 10 + length)), SamplingParams(seed=1, **sampling))


def arrays(*shape: int) -> LogprobArrays:
    """Values that name their place: token -i, rank i + 1, alternatives 100 i + k."""
    flat = np.arange(int(np.prod(shape)))
    token = -flat.astype(np.float32).reshape(shape)
    return LogprobArrays(
        token,
        (flat + 1).astype(np.int32).reshape(shape),
        (100 * flat[:, None] + np.arange(20)).astype(np.int32).reshape(*shape, 20),
        (token[..., None] - np.arange(20)).astype(np.float32),
    )


def output(plan: StepPlan, decode: list[list[int]] = (), chunk: list[int] = (), logprobs: bool = False) -> StepOutput:
    """``decode``: one list per step."""
    rows = len(plan.decode_slots)
    tokens = np.asarray(decode, np.int32).reshape(plan.num_steps, rows)
    return StepOutput(
        plan.step_id,
        tokens,
        np.asarray(chunk, np.int32),
        arrays(plan.num_steps, rows) if logprobs else None,
        arrays(len(plan.chunks)) if logprobs else None,
        tuple(arrays(len(c.token_ids)) if c.prompt_logprobs else None for c in plan.chunks),
    )


def generate(scheduler: Scheduler, tokens: list[int], **kw):
    """Feeds one request's tokens, first by its chunk, then by decode steps; returns all events."""
    plan = scheduler.plan()
    events = scheduler.commit(plan, output(plan, chunk=tokens[:1], **kw))
    fed = 1
    while scheduler.has_work():
        plan = scheduler.plan()
        column = (tokens[fed:] + [-1] * plan.num_steps)[: plan.num_steps]
        events += scheduler.commit(plan, output(plan, [[token] for token in column], **kw))
        fed += plan.num_steps
        scheduler.check_integrity()
    return events


def ids(events) -> list[int]:
    return [token for event in events for token in event.token_ids]


def test_a_stop_inside_a_step_ends_ids_and_logprobs_there():
    scheduler = make_scheduler()
    scheduler.add(request(stop_token_ids=(77,), logprobs=2))
    events = generate(scheduler, [5, 6, 77, 8, 9], logprobs=True)
    assert ids(events) == [5, 6, 77]
    assert [len(event.logprobs) for event in events] == [1, 2]
    assert events[-1].finish_reason is FinishReason.STOP
    assert events[-1].stop_reason == 77
    assert scheduler.stats().pages_used == (0,)


def test_eos_ends_without_a_stop_reason_and_is_among_the_tokens():
    scheduler = make_scheduler(eos=(1, 106))
    scheduler.add(request(stop_token_ids=(106,)))
    events = generate(scheduler, [5, 106])
    assert ids(events) == [5, 106]
    assert (events[-1].finish_reason, events[-1].stop_reason) == (FinishReason.STOP, None)


@pytest.mark.parametrize("eos", [1, 106])
def test_every_eos_id_ends(eos):
    scheduler = make_scheduler(eos=(1, 106))
    scheduler.add(request())
    assert ids(generate(scheduler, [5, eos, 7])) == [5, eos]


def test_ignored_eos_is_plain_text_unless_it_is_named_as_a_stop():
    scheduler = make_scheduler()
    scheduler.add(request(ignore_eos=True, max_tokens=4))
    assert scheduler.plan().admits[0].stop_ids == ()
    scheduler.abort("r")
    scheduler = make_scheduler()
    scheduler.add(request(ignore_eos=True, max_tokens=4))
    events = generate(scheduler, [5, 2, 2, 6])
    assert ids(events) == [5, 2, 2, 6]
    assert events[-1].finish_reason is FinishReason.LENGTH
    scheduler.add(request("named", ignore_eos=True, stop_token_ids=(2,)))
    events = generate(scheduler, [5, 2, 2, 6])
    assert (ids(events), events[-1].stop_reason) == ([5, 2], 2)


def test_min_tokens_is_a_floor_for_every_stop_id():
    # min_tokens 4, EOS ids 2 and 7: neither ends it before, the first one after does.
    scheduler = make_scheduler(eos=(2, 7))
    scheduler.add(request(min_tokens=4, stop_token_ids=(9,)))
    assert ids(generate(scheduler, [2, 7, 9, 3, 7, 5])) == [2, 7, 9, 3, 7]
    scheduler.add(request(min_tokens=2))
    assert ids(generate(scheduler, [2, 7, 2, 3])) == [2, 7, 2]


def test_a_stop_at_the_last_possible_token_is_a_stop():
    scheduler = make_scheduler()
    scheduler.add(request(max_tokens=3))
    assert generate(scheduler, [5, 6, 2])[-1].finish_reason is FinishReason.STOP


def test_not_finite_logits_end_that_request_alone():
    scheduler = make_scheduler()
    scheduler.add(request("bad", max_tokens=5))
    scheduler.add(request("good", max_tokens=5))
    plan = scheduler.plan()
    scheduler.commit(plan, output(plan, chunk=[4, 5]))
    plan = scheduler.plan()
    assert plan.num_steps == 4
    events = scheduler.commit(plan, output(plan, [[6, 7], [-2, 8], [-1, 9], [-1, 10]]))
    bad, good = events
    assert (bad.token_ids, bad.finish_reason) == ((6,), FinishReason.ERROR)
    assert "not finite" in bad.error
    assert (good.token_ids, good.finish_reason, good.error) == ((7, 8, 9, 10), FinishReason.LENGTH, None)
    assert not scheduler.has_work()


def test_a_row_that_the_device_ended_too_early_is_an_error_not_a_hang():
    scheduler = make_scheduler()
    scheduler.add(request(max_tokens=9))
    events = generate(scheduler, [5, 6])
    assert events[-1].finish_reason is FinishReason.ERROR
    assert "internal error" in events[-1].error


def test_logprobs_keep_k_alternatives_of_their_own_row():
    scheduler = make_scheduler()
    scheduler.add(request("none", max_tokens=3))
    scheduler.add(request("two", max_tokens=3, logprobs=2))
    scheduler.add(request("own", max_tokens=3, logprobs=0))
    plan = scheduler.plan()
    first = scheduler.commit(plan, output(plan, chunk=[50, 51, 52], logprobs=True))
    assert [event.logprobs for event in first] == [
        None,
        (Logprob(51, -1.0, 2, ((100, -1.0), (101, -2.0))),),
        (Logprob(52, -2.0, 3, ()),),
    ]
    plan = scheduler.plan()
    assert plan.num_steps == 2
    second = scheduler.commit(plan, output(plan, [[60, 61, 62], [70, 71, 72]], logprobs=True))
    assert [event.token_ids for event in second] == [(60, 70), (61, 71), (62, 72)]
    # Entry [i, b] of a [2, 3] step is number 3 i + b.
    assert second[1].logprobs == (
        Logprob(61, -1.0, 2, ((100, -1.0), (101, -2.0))),
        Logprob(71, -4.0, 5, ((400, -4.0), (401, -5.0))),
    )
    assert second[2].logprobs == (Logprob(62, -2.0, 3, ()), Logprob(72, -5.0, 6, ()))


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_prompt_logprobs_of_33_tokens_in_pages_of_16_and_chunks_of_8(lag):
    sizes = {"max_slots": 2, "page_size": 16, "max_model_len": 64, "max_step_tokens": 8, "decode_steps": 4}
    harness = Harness(groups=(FULL, window(11)), num_pages=(12, 12), lag=lag, **sizes)
    for name in ("first", "second"):
        one = Request(
            name, tuple((7 * i) % 40 + 3 for i in range(33)), SamplingParams(max_tokens=4, seed=3, prompt_logprobs=2)
        )
        harness.add(one)
        harness.drain()
        check_result(harness, one, 37)
        entries = harness.events[name][0].prompt_logprobs
        assert len(entries) == 33
        assert entries[0] is None
    assert max(len(chunk.token_ids) for plan in harness.plans for chunk in plan.chunks) == 8


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt():
    sizes = {"max_slots": 3, "page_size": 4, "max_model_len": 64, "max_step_tokens": 8, "decode_steps": 1}
    harness = Harness(groups=(FULL,), num_pages=(12,), **sizes)
    grow = Request("grow", (5, 6, 7), SamplingParams(max_tokens=30, seed=1, ignore_eos=True))
    scored = Request(
        "scored", tuple(range(3, 36)), SamplingParams(max_tokens=3, seed=1, ignore_eos=True, prompt_logprobs=1), 1
    )
    harness.add(grow)
    harness.step()
    harness.add(scored)
    for _ in range(2):
        harness.step()
    harness.scheduler._preempt(harness.scheduler._running[-1])  # as when pages run out
    harness.drain()
    starts = [chunk.start for plan in harness.plans for chunk in plan.chunks if chunk.request_id == "scored"]
    assert starts.count(0) == 2
    check_result(harness, grow, 33)
    check_result(harness, scored, 36)


def test_no_prompt_logprobs_are_asked_for_again_once_delivered():
    sizes = {"max_slots": 3, "page_size": 4, "max_model_len": 64, "max_step_tokens": 8, "decode_steps": 1}
    harness = Harness(groups=(FULL,), num_pages=(12,), **sizes)
    one = Request("r", tuple(range(3, 14)), SamplingParams(max_tokens=9, seed=1, ignore_eos=True, prompt_logprobs=1))
    harness.add(one)
    harness.run_until(lambda: len(harness.tokens("r")) == 4)
    harness.scheduler._preempt(harness.scheduler._running[-1])
    harness.drain()
    check_result(harness, one, 20)
    asked = [chunk.prompt_logprobs for plan in harness.plans for chunk in plan.chunks]
    assert asked == [True, True, False, False]


def test_prompt_logprobs_of_a_single_token_need_no_scores():
    scheduler = make_scheduler()
    scheduler.add(request(length=1, max_tokens=1, prompt_logprobs=3))
    plan = scheduler.plan()
    assert not plan.chunks[0].prompt_logprobs
    (event,) = scheduler.commit(plan, output(plan, chunk=[5]))
    assert event.prompt_logprobs == (None,)


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_max_tokens_0_scores_the_prompt_and_ends(prompt_logprobs):
    sizes = {"max_slots": 2, "page_size": 4, "max_model_len": 64, "max_step_tokens": 8, "decode_steps": 4}
    harness = Harness(groups=(FULL,), num_pages=(12,), **sizes)
    one = Request(
        "r", tuple(range(3, 24)), SamplingParams(max_tokens=0, seed=1, logprobs=1, prompt_logprobs=prompt_logprobs)
    )
    harness.add(one)
    harness.drain()
    harness.check_idle()
    (event,) = harness.events["r"]
    assert (event.token_ids, event.logprobs, event.finish_reason) == ((), (), FinishReason.LENGTH)
    if prompt_logprobs is None:
        assert event.prompt_logprobs is None
    else:
        got = [entry and (entry.logprob, entry.rank) for entry in event.prompt_logprobs]
        assert got == prompt_scores(one, (FULL,))
    assert not any(chunk.sample for plan in harness.plans for chunk in plan.chunks)


# Aborts and failures


def test_an_abort_frees_everything_at_once_and_late_tokens_are_ignored():
    scheduler = make_scheduler()
    scheduler.add(request("gone", 9, max_tokens=20))
    scheduler.add(request("waits", max_tokens=20))
    plan = scheduler.plan()
    assert scheduler.abort("gone")
    scheduler.check_integrity()
    assert scheduler.stats().pages_used == (1,)
    events = scheduler.commit(plan, output(plan, chunk=[5, 6]))
    assert [event.request_id for event in events] == ["waits"]
    assert not scheduler.abort("gone")
    assert scheduler.abort("waits")
    assert not scheduler.abort("never seen")
    assert not scheduler.has_work()
    assert scheduler.stats().pages_used == (0,)


def test_late_tokens_of_an_aborted_request_do_not_reach_a_new_one_of_the_same_id():
    scheduler = make_scheduler()
    scheduler.add(request(max_tokens=5))
    old = scheduler.plan()
    scheduler.abort("r")
    scheduler.add(request(max_tokens=5))
    new = scheduler.plan()
    assert new.admits[0].slot == old.admits[0].slot
    assert scheduler.commit(old, output(old, chunk=[40])) == []
    (event,) = scheduler.commit(new, output(new, chunk=[41]))
    assert event.token_ids == (41,)


def test_an_aborted_waiting_request_leaves_the_queue():
    scheduler = make_scheduler(max_slots=1)
    for name in ("a", "b", "c"):
        scheduler.add(request(name, max_tokens=1))
    assert scheduler.abort("b")
    plans = [scheduler.plan(), scheduler.plan()]
    assert [admit.request.id for plan in plans for admit in plan.admits] == ["a", "c"]
    assert scheduler.plan() is None


def test_a_row_that_stopped_is_still_in_the_next_plan_and_ignored():
    scheduler = make_scheduler(decode_steps=1)
    scheduler.add(request(max_tokens=9))
    first, second = scheduler.plan(), scheduler.plan()
    (event,) = scheduler.commit(first, output(first, chunk=[2]))
    assert event.finish_reason is FinishReason.STOP
    assert scheduler.plan() is None
    assert scheduler.has_work()
    assert scheduler.commit(second, output(second, [[-1]])) == []
    assert not scheduler.has_work()


def test_fail_ends_the_named_requests_and_frees_them():
    scheduler = make_scheduler()
    for name in ("a", "b", "c"):
        scheduler.add(request(name, max_tokens=3))
    plan = scheduler.plan()
    events = scheduler.fail(["b", "b", "unknown", "a"], "the device is gone")
    assert [(event.request_id, event.finish_reason, event.error) for event in events] == [
        ("b", FinishReason.ERROR, "the device is gone"),
        ("a", FinishReason.ERROR, "the device is gone"),
    ]
    scheduler.check_integrity()
    (event,) = scheduler.commit(plan, output(plan, chunk=[5, 6, 7]))
    assert (event.request_id, event.token_ids) == ("c", (7,))


def test_discard_fails_the_requests_of_a_step_that_did_not_run_and_no_other():
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=3))
    first = scheduler.plan()
    scheduler.add(request("b", max_tokens=1))
    second = scheduler.plan()
    scheduler.add(request("c", max_tokens=1))
    events = scheduler.discard(first, "out of memory")
    assert [(event.request_id, event.error) for event in events] == [("a", "out of memory")]
    (event,) = scheduler.commit(second, output(second, [[-1]], chunk=[8]))
    assert (event.request_id, event.token_ids, event.finish_reason) == ("b", (8,), FinishReason.LENGTH)
    scheduler.check_integrity()
    assert [event.request_id for event in generate(scheduler, [9])] == ["c"]


def test_plans_are_committed_in_order():
    scheduler = make_scheduler()
    scheduler.add(request(max_tokens=9))
    first, second = scheduler.plan(), scheduler.plan()
    assert first.step_id < second.step_id
    with pytest.raises(AssertionError, match="in order"):
        scheduler.commit(second, output(second, [[5]] * second.num_steps))
