"""Arithmetic that the field often gets wrong by one or by a factor, on inputs small enough to know the answer."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsqueeze.kv.pool import KVPool
from jaxsqueeze.models.attention import QueryRows
from jaxsqueeze.models.decoder import Decoder
from jaxsqueeze.models.layers import ACTIVATIONS
from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.target import CPU

PAGE = 2
TABLE = np.array([[3, 1, 4]], np.int32)  # six positions in three pages, out of order


ATTEND = jax.jit(functools.partial(paged_attention, target=CPU), static_argnames=("scale", "window", "softcap"))


def pages_of(values_TD: np.ndarray, junk: float = 99.0) -> jax.Array:
    """One KV head's pool [5, 1, PAGE, D] that holds row t at position t; the other places hold junk."""
    t = np.arange(len(values_TD), dtype=np.int32)
    pool = jnp.full((5, 1, PAGE, values_TD.shape[1]), junk)
    return kv_write(pool, None, jnp.asarray(values_TD)[:, None], TABLE[0, t // PAGE], t % PAGE, target=CPU)[0]


def attend(q_QD, k_TD, v_TD, positions, base=0, table=TABLE, **kwargs) -> np.ndarray:
    """f32[Q, D]: one row, one KV head, one query head."""
    q = jnp.asarray(q_QD, jnp.float32)[None, :, None, None]
    out = ATTEND(
        q,
        pages_of(k_TD, junk=np.nan),  # as a failed request may leave it
        pages_of(v_TD),
        jnp.asarray(table),
        jnp.asarray([base], jnp.int32),
        jnp.asarray([positions], jnp.int32),
        **{"scale": 1.0, **kwargs},
    )
    return np.asarray(out)[0, :, 0, 0]


def visible(out_QD: np.ndarray) -> list[list[int]]:
    """With zero queries and one-hot values each visible position gets an equal share of the output."""
    for row in out_QD:
        np.testing.assert_allclose(row[row > 0], 1 / (row > 0).sum(), rtol=1e-6)
    return [list(np.flatnonzero(row)) for row in out_QD]


W4 = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]


def test_window_of_four_over_six_tokens_in_prefill():
    out = attend(np.zeros((6, 6)), np.ones((6, 6), np.float32), np.eye(6, dtype=np.float32), range(6), window=4)
    assert visible(out) == W4


@pytest.mark.parametrize("position", range(6))
def test_window_of_four_over_six_tokens_in_decode(position):
    k, v = np.ones((6, 6), np.float32), np.eye(6, dtype=np.float32)
    assert visible(attend(np.zeros((1, 6)), k, v, [position], window=4)) == [W4[position]]
    assert visible(attend(np.zeros((1, 6)), k, v, [position])) == [list(range(position + 1))]


def test_window_after_its_first_page_was_freed():
    k, v = np.ones((6, 6), np.float32), np.eye(6, dtype=np.float32)
    out = attend(np.zeros((1, 6)), k, v, [5], window=4, base=1, table=[[1, 4, 0]])
    assert visible(out) == [[2, 3, 4, 5]]


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_nothing_spreads_from_places_not_yet_written(length):
    k, v = np.ones((length, 6), np.float32), np.eye(6, dtype=np.float32)[:length]
    assert visible(attend(np.ones((1, 6)), k, v, [length - 1])) == [list(range(length))]


def test_masked_query_is_exactly_zero():
    k, v = np.ones((6, 6), np.float32), np.eye(6, dtype=np.float32)
    out = attend(np.ones((2, 6)), k, v, [-1, 2])
    np.testing.assert_array_equal(out[0], 0)
    assert visible(out[1:]) == [[0, 1, 2]]


def test_scores_are_capped_after_scaling():
    # Scores 60 and 0, capped at 30: 28.921 and 0.
    q, k = np.array([[120.0, 0]]), np.array([[1.0, 0], [0, 1]], np.float32)
    v = np.array([[0.0, 0], [1, 0]], np.float32)
    share = float(attend(q, k, v, [1], scale=0.5, softcap=30.0)[0, 0])
    assert math.log((1 - share) / share) == pytest.approx(28.921, abs=1e-3)
    assert 30 * math.tanh(2) == pytest.approx(28.921, abs=1e-3)


def test_logits_are_capped(golden_named):
    golden = golden_named("gemma2")
    cfg = dataclasses.replace(golden.cfg, final_softcap=30.0)
    table = np.zeros_like(golden.flat["embed/weight"])
    table[5, 0], table[6, 0] = 60.0, -1.0
    x = jnp.zeros((1, cfg.hidden_size)).at[0, 0].set(1.0)
    model = Decoder(cfg, jnp.dtype(jnp.float32), 8, CPU)
    logits = model.apply({"params": {"embed": {"weight": table}}}, x, method=Decoder.unembed)[0]
    assert float(logits[5]) == pytest.approx(28.921, abs=1e-3)
    assert float(logits[6]) == pytest.approx(30 * math.tanh(-1 / 30), rel=1e-5)
    assert float(logits[7]) == 0


@pytest.mark.parametrize(("name", "source"), [("qwen2", "embed"), ("llama", "lm_head")])
def test_head_is_the_embedding_only_when_tied(name, source, golden_named):
    golden = golden_named(name)
    x = np.random.default_rng(0).normal(size=(3, golden.cfg.hidden_size)).astype(np.float32)
    other = {"lm_head": {"weight": golden.flat["embed/weight"] * 2}} if golden.cfg.tie_embeddings else {}
    model = Decoder(golden.cfg, jnp.dtype(jnp.float32), 8, CPU)
    logits = model.apply({"params": {**golden.params, **other}}, x, method=Decoder.unembed)
    np.testing.assert_allclose(logits, x @ golden.flat[f"{source}/weight"].T, rtol=1e-4, atol=1e-5)


def test_embedding_scale_is_rounded_to_the_working_type(golden_named):
    """Gemma multiplies by sqrt(hidden) in the embedding's own type: 55.4256 is 55.5 in bfloat16, so 9 becomes 500
    (499.5 rounded), not 498. No layers, and a final norm that leaves its input as it is."""
    golden = golden_named("gemma2")
    cfg = dataclasses.replace(golden.cfg, layers=(), embed_scale=3072**0.5, norm_eps=1e12)
    params = {
        "embed": {"weight": jnp.full((cfg.vocab_size, cfg.hidden_size), 9, jnp.bfloat16)},
        "final_norm": {"scale": jnp.full(cfg.hidden_size, 1e6)},
    }
    rows = (QueryRows(jnp.zeros((1, 1), jnp.int32), ()),)
    model = Decoder(cfg, jnp.dtype(jnp.bfloat16), 8, CPU)
    x, _ = model.apply({"params": params}, jnp.zeros(1, jnp.int32), KVPool((), ()), rows)
    assert x.dtype == jnp.bfloat16
    assert set(np.asarray(x, np.float32).ravel()) == {500.0}


def test_activations():
    x = np.linspace(-3, 3, 7)
    np.testing.assert_allclose(ACTIVATIONS["silu"](x), x / (1 + np.exp(-x)), rtol=1e-5)
    tanh = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(ACTIVATIONS["gelu_tanh"](x), tanh, rtol=1e-5, atol=1e-6)
