"""The counter that the zero-compilations rule rests on, and the buckets that make it possible."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxsqueeze.config import PREFILL_ROW, EngineConfig
from jaxsqueeze.runner.buckets import decode_sizes, make_buckets
from jaxsqueeze.runner.compiles import CompileCounter


def test_a_compilation_is_noticed_and_a_second_call_is_not():
    counter, x = CompileCounter(), jnp.ones(7)
    double = jax.jit(lambda x: x * 2 + 3)
    before = counter.count
    double(x)
    assert counter.count == before + 1
    double(x + 0)
    after = counter.count
    double(x)
    assert counter.count == after


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "bfloat16"), ("cpu", "float32"), ("gpu", "bfloat16")])
@pytest.mark.parametrize("max_slots", [1, 2, 3, 6, 32, 33])
@pytest.mark.parametrize("max_step_tokens", [32, 96, 256, 1024])
def test_every_step_fits_a_bucket(deterministic, platform, dtype, max_slots, max_step_tokens):
    """Any number of rows up to max_slots, beside any number of prefill rows up to the step's budget; few programs."""
    config = EngineConfig(max_slots=max_slots, max_step_tokens=max_step_tokens, deterministic=deterministic)
    buckets = make_buckets(config, decode_sizes(max_slots, platform, dtype))
    most = max_step_tokens // PREFILL_ROW
    assert len(buckets.decode) <= (1 if deterministic else 7)
    assert len(buckets.mixed) <= (1 if deterministic else 4)
    for rows in range(max_slots + 1):
        assert buckets.pick_decode(rows) == min(size for size in buckets.decode if size >= rows)
        for prefill_rows in range(1, most + 1):
            beside = 0 if deterministic else rows  # decode is a program of its own then
            picked = buckets.pick_mixed(beside, prefill_rows)
            assert picked in buckets.mixed
            assert picked[0] >= beside
            assert prefill_rows <= picked[1] <= most
