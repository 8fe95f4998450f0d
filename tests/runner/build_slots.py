"""Slots filled through the same ``admit`` the engine uses, and one jitted ``sample`` of fixed shape over them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsqueeze.runner import state as slot_state
from jaxsqueeze.runner.sampling import Logprobs, sample
from jaxsqueeze.runner.state import SlotParams, SlotState
from jaxsqueeze.types import Admit, Request, SamplingParams
from pallas_kernels.target import CPU

V, ROWS, MAX_LEN = 40, 8, 64
LOW = -50.0  # a logit that nothing here lifts to the top

ADMIT = jax.jit(slot_state.admit)


@dataclasses.dataclass(frozen=True)
class Row:
    """One sequence in a slot."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    stop_ids: tuple[int, ...]
    sampling: SamplingParams

    @property
    def position(self) -> int:
        """Where the next token goes."""
        return len(self.prompt) + len(self.output)


def row(prompt=(1,), output=(), stop_ids=(), temperature=0.0, **sampling: Any) -> Row:
    return Row(tuple(prompt), tuple(output), tuple(stop_ids), SamplingParams(temperature=temperature, **sampling))


def admitted(
    rows: dict[int, Row], into: tuple[SlotParams, SlotState] | None = None, vocab: int = V
) -> tuple[SlotParams, SlotState]:
    """Slot number to sequence; the other slots stay as they are in ``into`` (default: empty)."""
    params, state = into or slot_state.initial_state(ROWS, vocab)
    for slot, r in rows.items():
        ids = np.asarray(r.prompt, np.int32), np.asarray(r.output, np.int32)
        admit = Admit(slot, Request("r", r.prompt, r.sampling), *ids, r.stop_ids, MAX_LEN)
        params, state = ADMIT(params, state, slot_state.admit_row(admit, vocab, MAX_LEN))
    return params, state


@functools.cache
def _compiled(rows: int, vocab: int):
    # Compiled for speed of compiling; the arithmetic is the same.
    return jax.jit(functools.partial(sample, target=CPU), compiler_options={"xla_backend_optimization_level": 0})


def sampled(
    logits: np.ndarray,
    slots: tuple[SlotParams, SlotState],
    positions: np.ndarray | list[int],
    rows: np.ndarray | list[int] | None = None,
) -> tuple[np.ndarray, Logprobs]:
    """Tokens i32[B] and logprobs of ``logits[B, V]``. ``rows``: the slot of each, default slot i for row i."""
    rows = range(len(logits)) if rows is None else rows
    run = _compiled(*logits.shape)
    where = jnp.asarray(positions, jnp.int32), jnp.asarray(list(rows), jnp.int32)
    tokens, logprobs = run(jnp.asarray(logits, jnp.float32), *where, *slots)
    return np.asarray(tokens), jax.tree.map(np.asarray, logprobs)


def choose(rows: dict[int, Row], logits: dict[int, dict[int, float]] | np.ndarray) -> dict[int, int]:
    """The token each slot of ``rows`` samples next. ``logits``: [ROWS, V], or per slot token to logit (others LOW)."""
    if isinstance(logits, dict):
        given, logits = logits, np.full((ROWS, V), LOW)
        for slot, values in given.items():
            for token, value in values.items():
                logits[slot, token] = value
    positions = [rows[s].position if s in rows else 0 for s in range(ROWS)]
    tokens, _ = sampled(logits, admitted(rows), positions)
    return {slot: int(tokens[slot]) for slot in rows}
