"""The compiled steps, as pure functions: ``decode_n`` and ``mixed``. ``runner.py`` jits them and donates.

Shape letters: B decode rows, N prefill rows of Q tokens, S slots, V vocabulary. Row i of a step works for slot
``slots[i]``; the trash slot S is always done, its tokens go to page 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxsqueeze.kv.pool import KVPool
from jaxsqueeze.models.attention import GroupPages, QueryRows
from jaxsqueeze.models.decoder import Decoder, Variables
from jaxsqueeze.runner.sampling import Logprobs, empty_logprobs, sample, score
from jaxsqueeze.runner.state import SlotParams, SlotState
from jaxsqueeze.types import NO_TOKEN
from pallas_kernels.target import Target

SCORE_ROWS = 32  # prompt positions scored at once: bounds the logits buffer to SCORE_ROWS * V floats


@struct.dataclass
class DecodeInputs:
    slots: jax.Array  # i32[B], S: masked
    groups: tuple[GroupPages, ...]  # rows as in slots
    num_steps: jax.Array  # i32, at most the static length of the output


@struct.dataclass
class PrefillInputs:
    """Chunks cut into rows of Q tokens; a row belongs to one sequence, masked tokens have position -1."""

    tokens: jax.Array  # i32[N, Q]
    positions: jax.Array  # i32[N, Q]
    groups: tuple[GroupPages, ...]
    slots: jax.Array  # i32[N]; S: this row samples nothing
    sample_at: jax.Array  # i32[N], index in the row of the token whose logits are sampled
    targets: jax.Array  # i32[N, Q], the prompt token after each, for prompt_logprobs; -1: not wanted


@struct.dataclass
class StepResult:
    """See types.StepOutput. The leading axis of decode outputs is the step."""

    decode_tokens: jax.Array  # i32[steps, B]
    decode_logprobs: Logprobs  # [steps, B]
    prefill_tokens: jax.Array | None  # i32[N]
    prefill_logprobs: Logprobs | None  # [N]
    prompt_logprobs: Logprobs | None  # [N, Q]


def decode_n(
    model: Decoder,
    max_steps: int,
    variables: Variables,
    pool: KVPool,
    state: SlotState,
    slot_params: SlotParams,
    inp: DecodeInputs,
) -> tuple[KVPool, SlotState, StepResult]:
    """Up to ``inp.num_steps`` tokens for each row; rows that end are masked, the loop stops when all have.

    Donates: pool, state.
    """
    B = inp.slots.shape[0]

    @struct.dataclass
    class Carry:
        step: jax.Array
        pool: KVPool
        state: SlotState
        tokens: jax.Array  # i32[max_steps, B]
        logprobs: Logprobs  # [max_steps, B]

    def more(c: Carry) -> jax.Array:
        return (c.step < inp.num_steps) & ~jnp.all(c.state.done[inp.slots])

    def one(c: Carry) -> Carry:
        live = ~c.state.done[inp.slots]
        hidden, pool = _decode_hidden(model, variables, c.pool, c.state, inp, live)
        logits = model.apply(variables, hidden, method=Decoder.unembed)
        tokens, logprobs, state = _sample_and_advance(
            model.target, logits, c.state.position[inp.slots] + 1, inp.slots, live, slot_params, c.state
        )
        put = lambda whole, new: lax.dynamic_update_index_in_dim(whole, new, c.step, 0)  # noqa: E731
        return Carry(c.step + 1, pool, state, put(c.tokens, tokens), jax.tree.map(put, c.logprobs, logprobs))

    start = Carry(
        jnp.int32(0), pool, state, jnp.full((max_steps, B), NO_TOKEN, jnp.int32), empty_logprobs((max_steps, B))
    )
    end = lax.while_loop(more, one, start)
    return end.pool, end.state, StepResult(end.tokens, end.logprobs, None, None, None)


def mixed(
    model: Decoder,
    variables: Variables,
    pool: KVPool,
    state: SlotState,
    slot_params: SlotParams,
    decode: DecodeInputs,
    prefill: PrefillInputs,
) -> tuple[KVPool, SlotState, StepResult]:
    """One token for each decode row beside chunks of prefill, one pass over the weights.

    Donates: pool, state.
    """
    B = decode.slots.shape[0]
    N, Q = prefill.tokens.shape
    live = ~state.done[decode.slots]
    decode_tokens, decode_rows = _decode_rows(state, decode, live)
    rows = (decode_rows, QueryRows(prefill.positions, prefill.groups))
    tokens_T = jnp.concatenate([decode_tokens, prefill.tokens.reshape(-1)])
    hidden_TH, pool = model.apply(variables, tokens_T, pool, rows)

    prefill_hidden = hidden_TH[B:].reshape(N, Q, -1)
    at = prefill.sample_at
    last_hidden = jnp.take_along_axis(prefill_hidden, at[:, None, None], axis=1)[:, 0]
    logits = model.apply(variables, jnp.concatenate([hidden_TH[:B], last_hidden]), method=Decoder.unembed)
    trash = state.done.shape[0] - 1
    slots = jnp.concatenate([decode.slots, prefill.slots])
    last_position = jnp.take_along_axis(prefill.positions, at[:, None], axis=1)[:, 0]
    positions = jnp.concatenate([state.position[decode.slots], last_position]) + 1
    live = jnp.concatenate([live, prefill.slots != trash])
    tokens, logprobs, state = _sample_and_advance(model.target, logits, positions, slots, live, slot_params, state)

    wanted = jnp.any(prefill.targets >= 0)
    prompt = lax.cond(
        wanted, lambda: _score_prompt(model, variables, prefill_hidden, prefill.targets), lambda: empty_logprobs((N, Q))
    )
    first = jax.tree.map(lambda a: a[:B][None], (tokens, logprobs))
    rest = jax.tree.map(lambda a: a[B:], (tokens, logprobs))
    return pool, state, StepResult(*first, *rest, prompt)


def _decode_rows(state: SlotState, inp: DecodeInputs, live: jax.Array) -> tuple[jax.Array, QueryRows]:
    positions = jnp.where(live, state.position[inp.slots], -1)
    return state.last_token[inp.slots], QueryRows(positions[:, None], inp.groups)


def _decode_hidden(model, variables, pool, state, inp: DecodeInputs, live) -> tuple[jax.Array, KVPool]:
    tokens, rows = _decode_rows(state, inp, live)
    return model.apply(variables, tokens, pool, (rows,))


def _sample_and_advance(
    target: Target,
    logits: jax.Array,
    positions: jax.Array,
    slots: jax.Array,
    live: jax.Array,
    slot_params: SlotParams,
    state: SlotState,
) -> tuple[jax.Array, Logprobs, SlotState]:
    """Samples for absolute ``positions``; live rows move on and end at a stop id or at their length.

    Returns tokens (``NO_TOKEN`` for rows that are not live), logprobs, state.
    """
    tokens, logprobs = sample(logits, positions, slots, slot_params, state, target=target)
    stopped = jnp.any(slot_params.stop_ids[slots] == tokens[:, None], axis=1) & (tokens >= 0)
    done = stopped | (tokens < 0) | (positions + 1 >= slot_params.max_len[slots])
    where = jnp.where(live, slots, state.done.shape[0] - 1)  # rows that are not live write the trash slot
    recent = jnp.concatenate([state.recent[slots][:, 1:], tokens[:, None]], axis=1)
    state = SlotState(
        last_token=state.last_token.at[where].set(jnp.maximum(tokens, 0)),
        position=state.position.at[where].set(positions),
        done=state.done.at[where].set(done).at[-1].set(True),
        recent=state.recent.at[where].set(recent),
        output_count=state.output_count.at[where, jnp.maximum(tokens, 0)].add(1),
    )
    return jnp.where(live, tokens, NO_TOKEN), logprobs, state


def _score_prompt(model: Decoder, variables: Variables, hidden_NQH: jax.Array, targets_NQ: jax.Array) -> Logprobs:
    """Logprobs of each position's next prompt token, a few rows of logits at a time."""
    N, Q, H = hidden_NQH.shape
    rows = min(SCORE_ROWS, N * Q)
    blocks = -(-N * Q // rows)
    pad = blocks * rows - N * Q
    hidden = jnp.pad(hidden_NQH.reshape(N * Q, H), ((0, pad), (0, 0))).reshape(blocks, rows, H)
    targets = jnp.pad(targets_NQ.reshape(N * Q), (0, pad)).reshape(blocks, rows)

    def block(x):
        logits = model.apply(variables, x[0], method=Decoder.unembed)
        return score(logits, jnp.maximum(x[1], 0))

    scores = lax.map(block, (hidden, targets))
    return jax.tree.map(lambda a: a.reshape(blocks * rows, *a.shape[2:])[: N * Q].reshape(N, Q, *a.shape[2:]), scores)
