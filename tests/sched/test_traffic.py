"""Random traffic over small pools: every accepted request ends, with exactly the tokens of its solo run."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxsqueeze.types import CacheGroup, Request, RequestRefused, SamplingParams
from tests.sched.build_device import VOCAB, Harness
from tests.sched.build_traffic import FULL, check_result, window

MIXES = [(FULL,), (FULL, window(5)), (window(7),), (window(3), window(12)), (FULL, window(1), window(9))]
TOKENS = st.integers(0, VOCAB - 1)


def fits(groups: tuple[CacheGroup, ...], tokens: int, *, pages: int, page_size: int, step_tokens: int) -> bool:
    """Whether a lone sequence of so many written tokens fits pools of ``pages`` pages, by the formulas of the issue."""
    for group in groups:
        need = -(-tokens // page_size)
        if group.window is not None:
            need = min(need, -(-(group.window + step_tokens - 2) // page_size) + 1)
        if need > pages - 1:
            return False
    return True


def final_length(request: Request, max_model_len: int, **sizes) -> int | None:
    """Total length at which the request ends; None: it must be refused."""
    prompt, wanted = len(request.prompt_ids), request.sampling.max_tokens
    if prompt >= max_model_len:
        return None
    if wanted is not None:
        length = min(max_model_len, prompt + wanted)
        return length if fits(tokens=max(prompt, length - 1), **sizes) else None
    lengths = [length for length in range(prompt + 1, max_model_len + 1) if fits(tokens=length - 1, **sizes)]
    return max(lengths, default=None)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.none() | st.integers(0, 30))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, 6 if max_tokens is None else min(6, max_tokens))),
        seed=draw(st.integers(0, 2**40)),
        stop_token_ids=tuple(draw(st.lists(TOKENS, max_size=2))),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.none() | st.integers(0, 3)),
        prompt_logprobs=draw(st.none() | st.integers(0, 3)),
    )


class Traffic(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from(MIXES),
        page_size=st.sampled_from([1, 2, 4, 8]),
        pages=st.integers(4, 14),
        max_slots=st.integers(1, 5),
        max_model_len=st.integers(8, 60),
        step_pages=st.integers(1, 4),
        decode_steps=st.integers(1, 5),
        deterministic=st.booleans(),
        lag=st.integers(0, 2),
    )
    def start(self, groups, page_size, pages, max_slots, max_model_len, step_pages, decode_steps, deterministic, lag):
        self.step_tokens = page_size * step_pages
        self.deterministic = deterministic
        self.sizes = {
            "max_model_len": max_model_len,
            "groups": groups,
            "pages": pages,
            "page_size": page_size,
            "step_tokens": max(self.step_tokens, decode_steps),
        }
        self.harness = Harness(
            groups=groups,
            num_pages=(pages,) * len(groups),
            lag=lag,
            max_slots=max_slots,
            page_size=page_size,
            max_model_len=max_model_len,
            max_step_tokens=self.step_tokens,
            decode_steps=decode_steps,
            deterministic=deterministic,
        )
        self.requests: dict[str, tuple[Request, int]] = {}
        self.aborted: set[str] = set()
        self.count = 0
        self.clock = 0.0

    @rule(
        prompts=st.lists(st.lists(TOKENS, min_size=1, max_size=50), min_size=1, max_size=4),
        sampling=sampling_params(),
        priority=st.integers(-1, 1),
        gap=st.sampled_from([0.0, 1.0]),
    )
    def add(self, prompts, sampling, priority, gap):
        self.clock += gap
        for prompt in prompts:
            self.count += 1
            request = Request(f"r{self.count}", tuple(prompt), sampling, priority, self.clock)
            max_len = final_length(request, **self.sizes)
            if max_len is None:
                with pytest.raises(RequestRefused):
                    self.harness.add(request)
            else:
                self.harness.add(request)
                self.requests[request.id] = (request, max_len)

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.harness.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        ended = self.harness.finish(request_id) is not None or request_id in self.aborted
        assert self.harness.scheduler.abort(request_id) is not ended
        if not ended:
            self.aborted.add(request_id)

    @invariant()
    def whole(self):
        if hasattr(self, "harness"):
            self.harness.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "harness"):
            return
        self.harness.drain()
        self.harness.check_idle()
        for request, max_len in self.requests.values():
            check_result(self.harness, request, max_len, aborted=request.id in self.aborted)
        for plan in self.harness.plans:
            assert sum(len(chunk.token_ids) for chunk in plan.chunks) <= self.step_tokens
            if self.deterministic:
                assert all(chunk.start % self.step_tokens == 0 for chunk in plan.chunks)


Traffic.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTraffic = Traffic.TestCase


@pytest.mark.parametrize("seed", range(12))
def test_dense_traffic_through_a_pool_that_is_too_small(seed):
    """Forty requests at once on a pool for about two of them: preemption is the rule, and changes no token."""
    rng = np.random.default_rng(seed)
    groups, page_size = MIXES[seed % len(MIXES)], int(rng.choice([2, 4, 8]))
    sizes = {"groups": groups, "page_size": page_size, "pages": 1 + int(rng.integers(48, 72)) // page_size}
    step_tokens = page_size * int(rng.integers(1, 5))
    harness = Harness(
        groups=groups,
        num_pages=(sizes["pages"],) * len(groups),
        lag=seed % 3,
        max_slots=6,
        page_size=page_size,
        max_model_len=40,
        max_step_tokens=step_tokens,
        decode_steps=int(rng.integers(1, 6)),
        deterministic=bool(seed % 2),
    )
    requests, aborted = [], set()
    for index in range(40):
        sampling = SamplingParams(
            max_tokens=int(rng.integers(0, 30)),
            seed=index,
            ignore_eos=bool(rng.random() < 0.7),
            logprobs=2 if rng.random() < 0.2 else None,
            prompt_logprobs=1 if rng.random() < 0.3 else None,
        )
        prompt = tuple(rng.integers(0, VOCAB, rng.integers(1, 30)).tolist())
        request = Request(f"r{index}", prompt, sampling, int(rng.integers(0, 2)), float(index // 3))
        max_len = final_length(request, 40, step_tokens=max(step_tokens, harness.scheduler._decode_steps), **sizes)
        if max_len is not None:
            harness.add(request)
            requests.append((request, max_len))
        for _ in range(rng.integers(0, 4)):
            harness.step()
        if rng.random() < 0.1 and harness.scheduler.abort(request.id):
            aborted.add(request.id)
    harness.drain()
    harness.check_idle()
    assert len(requests) > 20
    if groups[0].window is None:
        # Deterministic mode promises each request its pages at the door, so nothing is ever computed twice.
        assert (harness.scheduler.stats().preemptions == 0) == bool(seed % 2)
    for request, max_len in requests:
        check_result(harness, request, max_len, aborted=request.id in aborted)
