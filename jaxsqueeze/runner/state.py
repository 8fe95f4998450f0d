"""Device state of the slots: what sampling needs, and where each sequence stands.

Two pytrees: ``SlotParams`` is written when a sequence takes a slot and read-only in steps; ``SlotState`` changes every
step and is donated. Both have ``max_slots + 1`` rows; the last is the trash slot of masked rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxsqueeze.types import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    Admit,
    Request,
    SamplingParams,
)


@struct.dataclass
class SlotParams:
    seed: jax.Array  # u32[S+1, 2]
    temperature: jax.Array  # f32[S+1], 0: greedy
    top_k: jax.Array  # i32[S+1], V: off
    top_p: jax.Array  # f32[S+1]
    min_p: jax.Array  # f32[S+1]
    repetition: jax.Array  # f32[S+1]
    frequency: jax.Array  # f32[S+1]
    presence: jax.Array  # f32[S+1]
    min_len: jax.Array  # i32[S+1], stop ids are masked at positions before this
    max_len: jax.Array  # i32[S+1], total length at which the sequence ends
    num_logprobs: jax.Array  # i32[S+1], -1: none wanted
    stop_ids: jax.Array  # i32[S+1, MAX_STOP_IDS], padded with -1
    bias_ids: jax.Array  # i32[S+1, MAX_LOGIT_BIAS], padded with V
    bias: jax.Array  # f32[S+1, MAX_LOGIT_BIAS]
    bad_words: jax.Array  # i32[S+1, MAX_BAD_WORDS, MAX_BAD_WORD_LEN], right-aligned, padded with -1
    prompt_seen: jax.Array  # bool[S+1, V]


@struct.dataclass
class SlotState:
    last_token: jax.Array  # i32[S+1], the next input token
    position: jax.Array  # i32[S+1], where that input goes: tokens in the pool
    done: jax.Array  # bool[S+1], ended on the device; the host will hear of it
    recent: jax.Array  # i32[S+1, MAX_BAD_WORD_LEN - 1], last output tokens, newest last, padded with -2
    output_count: jax.Array  # i32[S+1, V]


def initial_state(max_slots: int, vocab_size: int) -> tuple[SlotParams, SlotState]:
    """All slots empty and done."""
    n = max_slots + 1

    def full(shape: tuple[int, ...], value: float, dtype: object) -> jax.Array:
        return jnp.full((n, *shape), value, dtype)

    params = SlotParams(
        seed=full((2,), 0, jnp.uint32),
        temperature=full((), 0, jnp.float32),
        top_k=full((), vocab_size, jnp.int32),
        top_p=full((), 1, jnp.float32),
        min_p=full((), 0, jnp.float32),
        repetition=full((), 1, jnp.float32),
        frequency=full((), 0, jnp.float32),
        presence=full((), 0, jnp.float32),
        min_len=full((), 0, jnp.int32),
        max_len=full((), 0, jnp.int32),
        num_logprobs=full((), -1, jnp.int32),
        stop_ids=full((MAX_STOP_IDS,), -1, jnp.int32),
        bias_ids=full((MAX_LOGIT_BIAS,), vocab_size, jnp.int32),
        bias=full((MAX_LOGIT_BIAS,), 0, jnp.float32),
        bad_words=full((MAX_BAD_WORDS, MAX_BAD_WORD_LEN), -1, jnp.int32),
        prompt_seen=full((vocab_size,), False, jnp.bool_),
    )
    state = SlotState(
        last_token=full((), 0, jnp.int32),
        position=full((), 0, jnp.int32),
        done=full((), True, jnp.bool_),
        recent=full((MAX_BAD_WORD_LEN - 1,), -2, jnp.int32),
        output_count=full((vocab_size,), 0, jnp.int32),
    )
    return params, state


@struct.dataclass
class AdmitRow:
    """Everything ``admit`` writes for one slot. Token lists are padded to ``max_model_len`` with V (dropped)."""

    slot: jax.Array  # i32
    params: SlotParams  # one row of each field, prompt_seen left out (None)
    recent: jax.Array  # i32[MAX_BAD_WORD_LEN - 1]
    prompt: jax.Array  # i32[max_model_len]
    output: jax.Array  # i32[max_model_len]


def _padded(values: object, size: int, fill: int, dtype: object = np.int32) -> np.ndarray:
    out = np.full(size, fill, dtype)
    values = np.asarray(values, dtype)
    out[: len(values)] = values
    return out


def admit_row(admit: Admit, vocab_size: int, max_model_len: int) -> AdmitRow:
    """Host side of an admission: numpy arrays of static shape."""
    s = admit.request.sampling
    seed = (s.seed or 0) % 2**64
    bad = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LEN), -1, np.int32)
    for i, word in enumerate(s.bad_words_ids):
        bad[i, MAX_BAD_WORD_LEN - len(word) :] = word
    recent = np.full(MAX_BAD_WORD_LEN - 1, -2, np.int32)
    tail = admit.output_ids[-len(recent) :]
    recent[len(recent) - len(tail) :] = tail
    params = SlotParams(
        seed=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        temperature=np.float32(s.temperature),
        top_k=np.int32(s.top_k if 0 < s.top_k < vocab_size else vocab_size),
        top_p=np.float32(s.top_p),
        min_p=np.float32(s.min_p),
        repetition=np.float32(s.repetition_penalty),
        frequency=np.float32(s.frequency_penalty),
        presence=np.float32(s.presence_penalty),
        min_len=np.int32(min(len(admit.prompt_ids) + s.min_tokens, admit.max_len)),
        max_len=np.int32(admit.max_len),
        num_logprobs=np.int32(-1 if s.logprobs is None else s.logprobs),
        stop_ids=_padded(admit.stop_ids, MAX_STOP_IDS, -1),
        bias_ids=_padded([t for t, _ in s.logit_bias], MAX_LOGIT_BIAS, vocab_size),
        bias=_padded([b for _, b in s.logit_bias], MAX_LOGIT_BIAS, 0, np.float32),
        bad_words=bad,
        prompt_seen=None,
    )
    return AdmitRow(
        slot=np.int32(admit.slot),
        params=params,
        recent=recent,
        prompt=_padded(admit.prompt_ids, max_model_len, vocab_size),
        output=_padded(admit.output_ids, max_model_len, vocab_size),
    )


def blank_row(vocab_size: int, max_model_len: int) -> AdmitRow:
    """An admission of nothing, for its shapes."""
    empty = np.empty(0, np.int32)
    request = Request("", (), SamplingParams())
    return admit_row(Admit(0, request, empty, empty, (), 0), vocab_size, max_model_len)


def admit(params: SlotParams, state: SlotState, row: AdmitRow) -> tuple[SlotParams, SlotState]:
    """Writes one slot. Donates: params, state."""
    slot = row.slot
    seen = params.prompt_seen.at[slot].set(False).at[slot, row.prompt].set(True, mode="drop")
    bare = jax.tree.map(lambda whole, new: whole.at[slot].set(new), params.replace(prompt_seen=None), row.params)
    count = state.output_count.at[slot].set(0).at[slot, row.output].add(1, mode="drop")
    state = state.replace(
        done=state.done.at[slot].set(False),
        recent=state.recent.at[slot].set(row.recent),
        output_count=count,
    )
    return bare.replace(prompt_seen=seen), state
