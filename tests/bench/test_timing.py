"""The loop that times an op runs every call on its own inputs, keeps every result, and drops and hoists nothing."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxsqueeze.bench import timing
from jaxsqueeze.bench.kernel_inputs import Fill, make
from pallas_kernels.kv_write import reference
from pallas_kernels.kv_write.problem import Problem


def dot(x, w):
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def operands(seed: int, rows: int = 8, width: int = 64) -> timing.Args:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(rows, width)), jnp.float32), jnp.asarray(rng.normal(size=(width, width)))


def test_results_are_those_of_the_call_and_every_call_is_in_the_program():
    sets = [operands(seed) for seed in range(3)]
    loop = timing.build(dot, sets[0], 3, floor_us=100)
    assert loop.calls == 3 * 2  # 500 us / (3 * 100 us), rounded up
    run = timing.Run(loop, sets)
    np.testing.assert_allclose(run.results(), dot(*sets[0]), rtol=1e-6)
    text = loop.program.as_text()
    body = text[: text.index("ENTRY")]
    assert body.count(" dot(") == 3


def test_what_is_updated_in_place_goes_from_call_to_call():
    """One call adds the set's own number to a counter: after n runs of the loop each set's counter tells its calls."""

    def add(total, step):
        return total + step, step * 2

    sets = [(jnp.zeros(()), jnp.float32(step)) for step in (1, 10)]
    loop = timing.build(add, sets[0], 2, carried=1, floor_us=125)
    assert loop.calls == 4
    run = timing.Run(loop, sets)
    for expected in (2, 4, 6):
        total, other = run.results()
        assert (total, other) == (expected, 2)


def test_pages_written_in_a_loop_are_the_pages_written_once():
    problem = Problem(T=3, K=2, D=8, page_size=4, dtype="float32", format="int8")
    call = functools.partial(reference.run, problem)
    want = call(*make("kv_write", problem, Fill(0, pages=6)))
    loop = timing.build(call, make("kv_write", problem, Fill(0, pages=6)), 2, carried=2, floor_us=500)
    run = timing.Run(loop, [make("kv_write", problem, Fill(seed, pages=6)) for seed in range(2)])
    run.time(repeats=2, seconds=0)
    jax.tree.map(np.testing.assert_array_equal, run.results(), want)


def test_more_work_takes_more_time():
    def measured(repeat: int) -> timing.Timing:
        def call(x, w):
            return jax.lax.fori_loop(0, repeat, lambda _, y: jnp.tanh(dot(y, w)), x)

        sets = [operands(seed, rows=64) for seed in range(2)]
        return timing.Run(timing.build(call, sets[0], 2, floor_us=500), sets).time(repeats=3, seconds=0.05)

    little, much = measured(1), measured(1000)
    assert much.us > 10 * little.us > 0
    assert little.spread >= 0


def test_copies_do_not_fit_in_the_cache_together():
    def copies(size: int) -> int:
        return timing.copies_needed((jax.ShapeDtypeStruct((size,), jnp.uint8),))

    assert copies(timing.ROTATE_BYTES * 2 // 9) == 5
    assert copies(2 * timing.ROTATE_BYTES) == 2
    assert copies(1000) == timing.MAX_COPIES
