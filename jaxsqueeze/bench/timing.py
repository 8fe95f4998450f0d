"""How long one op takes on the device: medians of blocked wall time over many calls inside one program.

Dispatching a program costs the host about 10 microseconds, as long as a small op runs; so a program holds a loop over
the op, several such programs are in flight, and their wall time is divided by the number of calls. The op runs on
several sets of inputs in turn, whose total is larger than the caches: a step finds its weights in memory, not in the
L2. Inputs must be random: zeros draw less power, and run faster than real data on a chip that is at its limit.

What keeps the measured program honest: ``optimization_barrier`` ties each call's inputs to the call before it, so
that XLA neither hoists a call out of the loop, nor merges calls, nor fuses a call with its neighbours; and every
result is carried out of the loop, so that none is dropped. Arguments that an op updates in place are carried.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

ROTATE_BYTES = 2**28  # more than twice the L2 of any GPU so far (H200: 50 MB, B200: 126 MB)
MAX_COPIES = 16  # of inputs: smaller ones than ROTATE_BYTES / MAX_COPIES stay in the L2, as in a step they would
LOOP_US = 500.0  # a program's least time by a call's floor: dispatching hides behind the program before it

Args = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Timing:
    """``us``: median microseconds of a call; ``spread``: (slowest - fastest repeat) / median."""

    us: float
    spread: float


def copies_needed(args: Args) -> int:
    """Sets of inputs like ``args`` that do not fit in the caches together; two at least."""
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args))
    return max(2, min(MAX_COPIES, math.ceil(ROTATE_BYTES / max(size, 1))))


@dataclasses.dataclass(frozen=True)
class Loop:
    """A compiled program of ``calls`` calls: ``program(state, inputs) -> state``. Donates: state.

    The state is (count, what is updated in place, other results), the last two of each set of arguments.
    """

    program: Callable[[Any, Any], Any]
    shapes: Any  # of the state
    carried: int
    calls: int


def build(call: Callable[..., Any], args: Args, copies: int, *, carried: int = 0, floor_us: float) -> Loop:
    """Compiles the loop for ``copies`` sets of arguments like ``args`` (arrays or their shapes; None is allowed).

    ``carried``: how many of the first arguments the call updates in place: each call's first results take their place.
    ``floor_us``: a call is not quicker than this, which sizes the loop. Raises what the call or its compiler raises.
    """
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), args)
    results = jax.eval_shape(lambda *a: _split(call(*a), carried)[1], *abstract)
    rounds = max(1, math.ceil(LOOP_US / (copies * floor_us)))

    def one_round(_: int, state: Any, inputs: Sequence[Args]) -> Any:
        count, held, _ = state
        held, outputs = list(held), []
        token: Any = count
        for i, rest in enumerate(inputs):
            (mine, rest), token = lax.optimization_barrier(((held[i], rest), token))
            if outputs:
                held[i - 1], outputs[i - 1] = token
            else:
                count = token + 1
            held[i], out = token = _split(call(*mine, *rest), carried)
            outputs.append(out)
        return count, tuple(held), tuple(outputs)

    def run(state: Any, inputs: Sequence[Args]) -> Any:
        return lax.fori_loop(0, rounds, lambda i, s: one_round(i, s, inputs), state)

    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=_sharding(abstract))
    results = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=count.sharding), results)
    shapes = count, (abstract[:carried],) * copies, (results,) * copies
    program = jax.jit(run, donate_argnums=0).lower(shapes, (abstract[carried:],) * copies).compile()
    return Loop(program, shapes, carried, rounds * copies)


class Run:
    """A loop and its data on the device. Takes over the arrays of ``sets`` that the call updates in place."""

    def __init__(self, loop: Loop, sets: Sequence[Args]) -> None:
        n = loop.carried
        results = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), loop.shapes[2])
        self._state = jnp.int32(0), tuple(args[:n] for args in sets), results
        self._inputs = tuple(args[n:] for args in sets)
        self._loop, self._warm = loop, False

    def results(self) -> Any:
        """Of the call on the first set of arguments, after one more run of the loop."""
        self._seconds(1)
        _, held, results = self._state
        return (*held[0], *_tuple(results[0])) if self._loop.carried else results[0]

    def time(self, *, repeats: int = 5, seconds: float = 0.15) -> Timing:
        """``seconds``: of measurement, after a warm-up; a call that is much slower than its floor is repeated less."""
        if not self._warm:
            self._seconds(1)
        times = max(1, math.ceil(seconds / repeats / self._seconds(1)))
        end = time.perf_counter() + 3 * seconds
        each: list[float] = []
        while len(each) < 2 or (len(each) < repeats and time.perf_counter() < end):
            each.append(self._seconds(times) / (times * self._loop.calls) * 1e6)
        us = statistics.median(each)
        return Timing(us, (max(each) - min(each)) / us)

    def _seconds(self, times: int) -> float:
        jax.block_until_ready(self._state)
        begin = time.perf_counter()
        for _ in range(times):
            self._state = self._loop.program(self._state, self._inputs)
        jax.block_until_ready(self._state)
        self._warm = True
        return time.perf_counter() - begin


def _split(out: Any, carried: int) -> tuple[tuple[Any, ...], Any]:
    """What the call updates in place, and its other results."""
    return (out[:carried], out[carried:]) if carried else ((), out)


def _tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _sharding(tree: Any) -> Any:
    return next((x.sharding for x in jax.tree.leaves(tree)), None)
