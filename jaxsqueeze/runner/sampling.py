"""Sampling as a pure function of (seed, position, logits): Gumbel-max with a key folded from the request's seed and
the sampled token's absolute position. Batch neighbours, chunking and preemption cannot change a sample.

Order of the steps: logit_bias, bad words, min_tokens, penalties, temperature, top_k, top_p over what top_k left, min_p.
Work that no row of the batch asks for is skipped at run time (``lax.cond``): plain greedy traffic pays for an argmax.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxsqueeze.runner.state import SlotParams, SlotState
from jaxsqueeze.types import MAX_LOGPROBS, NOT_FINITE
from pallas_kernels.sample_topk.api import sample_topk
from pallas_kernels.target import Target


@struct.dataclass
class Logprobs:
    """Raw log-softmax of chosen tokens and the best alternatives (see types.LogprobArrays)."""

    token: jax.Array  # f32[B]
    rank: jax.Array  # i32[B]
    top_ids: jax.Array  # i32[B, MAX_LOGPROBS]
    top: jax.Array  # f32[B, MAX_LOGPROBS]


def sample(
    logits_BV: jax.Array,
    positions_B: jax.Array,
    slots_B: jax.Array,
    params: SlotParams,
    state: SlotState,
    *,
    target: Target,
) -> tuple[jax.Array, Logprobs]:
    """Tokens i32[B] for absolute ``positions_B`` of the sequences in ``slots_B``, and their logprobs.

    Rows whose logits have a NaN or no finite value give ``NOT_FINITE``. Logprobs are zeros where no row wants them.
    """
    with jax.named_scope("sample"):
        p = jax.tree.map(
            lambda a: a[slots_B], params.replace(prompt_seen=None, bias_ids=None, bias=None, bad_words=None)
        )
        x_BV = _biased(logits_BV, slots_B, params)
        x_BV = _without_bad_words(x_BV, slots_B, params, state)
        x_BV = _without_early_stops(x_BV, positions_B, p)
        x_BV = _penalised(x_BV, p, slots_B, params, state)
        token_B = lax.cond(
            jnp.any(p.temperature > 0),
            lambda: _random(x_BV, positions_B, p, target),
            lambda: jnp.argmax(x_BV, axis=-1),
        ).astype(jnp.int32)
        finite_B = jnp.isfinite(jnp.max(x_BV, axis=-1))  # max is NaN if any is, -inf if all are
        logprobs = lax.cond(
            jnp.any(p.num_logprobs >= 0),
            lambda: score(logits_BV, token_B),
            lambda: empty_logprobs((logits_BV.shape[0],)),
        )
        return jnp.where(finite_B, token_B, NOT_FINITE), logprobs


def score(logits_BV: jax.Array, token_B: jax.Array) -> Logprobs:
    """Log-softmax of ``token_B``, its rank, and the best alternatives."""
    norm_B = jax.nn.logsumexp(logits_BV, axis=-1)
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0]
    k = min(MAX_LOGPROBS, logits_BV.shape[-1])
    top, ids = lax.top_k(logits_BV, k)
    pad = ((0, 0), (0, MAX_LOGPROBS - k))
    return Logprobs(
        token=chosen_B - norm_B,
        rank=1 + jnp.sum(logits_BV > chosen_B[:, None], axis=-1, dtype=jnp.int32),
        top_ids=jnp.pad(ids.astype(jnp.int32), pad, constant_values=-1),
        top=jnp.pad(top - norm_B[:, None], pad, constant_values=-jnp.inf),
    )


def empty_logprobs(shape: tuple[int, ...]) -> Logprobs:
    return Logprobs(
        token=jnp.zeros(shape, jnp.float32),
        rank=jnp.zeros(shape, jnp.int32),
        top_ids=jnp.zeros((*shape, MAX_LOGPROBS), jnp.int32),
        top=jnp.zeros((*shape, MAX_LOGPROBS), jnp.float32),
    )


def _biased(x_BV, slots_B, params: SlotParams):
    """Adds logit_bias; duplicates of an id add up."""
    ids_BN = params.bias_ids[slots_B]

    def add():
        rows = jnp.arange(x_BV.shape[0])[:, None]
        return x_BV.at[rows, ids_BN].add(params.bias[slots_B], mode="drop")

    return lax.cond(jnp.any(ids_BN[:, 0] < x_BV.shape[1]), add, lambda: x_BV)


def _without_bad_words(x_BV, slots_B, params: SlotParams, state: SlotState):
    """Blocks the last token of each bad word whose other tokens are the newest output tokens."""
    words_BNL = params.bad_words[slots_B]

    def block():
        heads = words_BNL[..., :-1]
        matches = (heads == state.recent[slots_B][:, None, :]) | (heads < 0)
        last = words_BNL[..., -1]
        hit = matches.all(-1) & (last >= 0)
        ids = jnp.where(hit, last, x_BV.shape[1])
        return x_BV.at[jnp.arange(x_BV.shape[0])[:, None], ids].set(-jnp.inf, mode="drop")

    return lax.cond(jnp.any(words_BNL[:, 0, -1] >= 0), block, lambda: x_BV)


def _without_early_stops(x_BV, positions_B, p: SlotParams):
    """Masks EOS and stop ids before min_tokens."""
    early_B = positions_B < p.min_len

    def block():
        ids = jnp.where(early_B[:, None] & (p.stop_ids >= 0), p.stop_ids, x_BV.shape[1])
        return x_BV.at[jnp.arange(x_BV.shape[0])[:, None], ids].set(-jnp.inf, mode="drop")

    return lax.cond(jnp.any(early_B), block, lambda: x_BV)


def _penalised(x_BV, p: SlotParams, slots_B, params: SlotParams, state: SlotState):
    """Repetition (Keskar et al. 2019) over prompt and output; frequency and presence over output only."""
    wanted = (p.repetition != 1) | (p.frequency != 0) | (p.presence != 0)

    def apply():
        count_BV = state.output_count[slots_B]
        seen_BV = params.prompt_seen[slots_B] | (count_BV > 0)
        r = p.repetition[:, None]
        x = jnp.where(seen_BV, jnp.where(x_BV > 0, x_BV / r, x_BV * r), x_BV)
        return x - p.frequency[:, None] * count_BV - p.presence[:, None] * (count_BV > 0)

    return lax.cond(jnp.any(wanted), apply, lambda: x_BV)


def _random(x_BV, positions_B, p: SlotParams, target: Target):
    """Gumbel-max over the filtered distribution; greedy rows stay an argmax."""
    random_B = p.temperature > 0
    # The best logit becomes 0: a tiny temperature cannot overflow several of them into a tie at infinity.
    temperature_B = jnp.where(random_B, jnp.maximum(p.temperature, jnp.finfo(jnp.float32).tiny), 1.0)
    scaled_BV = (x_BV - jnp.max(x_BV, axis=-1, keepdims=True)) / temperature_B[:, None]
    kept_BV = sample_topk(
        scaled_BV,
        jnp.where(random_B, p.top_k, x_BV.shape[1]),
        jnp.where(random_B, p.top_p, 1.0),
        jnp.where(random_B, p.min_p, 0.0),
        target=target,
    )

    def noise(seed, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed), position)
        return jax.random.gumbel(key, (x_BV.shape[1],), jnp.float32)

    noisy_BV = kept_BV + jax.vmap(noise)(p.seed, positions_B)
    return jnp.argmax(jnp.where(random_B[:, None], noisy_BV, x_BV), axis=-1)
