"""Rotary tables: values worked out by hand from each scheme's definition, and live against transformers."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsqueeze.models.config import RopeConfig
from jaxsqueeze.models.rope import apply_rope, attention_scale, cos_sin, inv_freq


def table(rope: RopeConfig, max_len: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of every position a server of ``max_len`` has."""
    cos, sin = cos_sin(rope, max_len, jnp.arange(max_len))
    return np.asarray(cos), np.asarray(sin)


def test_default_frequencies():
    np.testing.assert_allclose(inv_freq(RopeConfig(10_000.0, 8), 1), [1, 0.1, 0.01, 0.001], rtol=1e-6)


@pytest.mark.parametrize(("length", "base"), [(1, 10_000.0), (8, 10_000.0), (9, 13_465.2), (16, 43_267.5)])
def test_dynamic_ntk_base_follows_the_served_length(length, base):
    rope = RopeConfig(10_000.0, 8, "dynamic", factor=2.0, original_max_len=8)
    assert float(inv_freq(rope, length)[1]) ** -4 == pytest.approx(base, rel=1e-5)


def test_partial_rotary_frequencies_and_pairs():
    rope = RopeConfig(10_000.0, 4)  # of a head of 8
    np.testing.assert_allclose(inv_freq(rope, 1), [1, 0.01], rtol=1e-6)
    x = np.arange(1.0, 9.0, dtype=np.float32)
    cos, sin = table(rope, 3)
    out = np.asarray(apply_rope(jnp.asarray(x), cos[2], sin[2]))
    for (a, b), angle in {(0, 2): 2.0, (1, 3): 0.02}.items():
        turned = complex(x[a], x[b]) * complex(math.cos(angle), math.sin(angle))
        np.testing.assert_allclose([out[a], out[b]], [turned.real, turned.imag], rtol=1e-6)
    np.testing.assert_array_equal(out[4:], x[4:])


def test_longrope_switches_tables_one_past_the_trained_length():
    rope = RopeConfig(
        100.0, 4, "longrope", factor=4.0, original_max_len=16, short_factor=(1.0, 2.0), long_factor=(4.0, 5.0)
    )
    short, long = [1.0, 0.1 / 2], [1 / 4, 0.1 / 5]
    np.testing.assert_allclose(inv_freq(rope, 15), short, rtol=1e-6)
    np.testing.assert_allclose(inv_freq(rope, 16), short, rtol=1e-6)
    np.testing.assert_allclose(inv_freq(rope, 17), long, rtol=1e-6)
    scale = math.sqrt(1 + math.log(4) / math.log(16))
    assert attention_scale(rope, 16) == attention_scale(rope, 17) == pytest.approx(scale)
    cos, sin = table(rope, 17)
    angles = np.outer(np.arange(17), long)
    np.testing.assert_allclose(cos, scale * np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, scale * np.sin(angles), atol=1e-6)


def test_linear_divides_every_frequency():
    np.testing.assert_allclose(inv_freq(RopeConfig(100.0, 4, "linear", factor=8.0), 1), [1 / 8, 0.1 / 8], rtol=1e-6)


def test_llama3_bands():
    rope = RopeConfig(
        10_000.0, 8, "llama3", factor=8.0, original_max_len=400, low_freq_factor=1.0, high_freq_factor=8.0
    )
    # Turns within 400 tokens: 63.7 (kept), 6.37 (blended), 0.637 and 0.0637 (divided).
    keep = (40 / (2 * math.pi) - 1) / 7
    expected = [1.0, 0.1 * (keep + (1 - keep) / 8), 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(inv_freq(rope, 1), expected, rtol=1e-6)


def test_yarn_ramp_with_and_without_truncation():
    rope = RopeConfig(10_000.0, 16, "yarn", factor=4.0, original_max_len=256, beta_fast=32.0, beta_slow=1.0)

    def dim_of(turns: float) -> float:
        return 16 * math.log(256 / (2 * math.pi * turns)) / (2 * math.log(10_000))

    plain = 10_000.0 ** -(np.arange(8) / 8)
    for truncate in (True, False):
        low, high = dim_of(32), dim_of(1)
        low, high = (math.floor(low), math.ceil(high)) if truncate else (low, high)
        divided = [min(max((i - low) / (high - low), 0), 1) for i in range(8)]
        assert 0 < divided[2] < 1, "the ramp must be inside the head for this test to mean anything"
        got = inv_freq(RopeConfig(**{**rope.__dict__, "truncate": truncate}), 1)
        np.testing.assert_allclose(got, [p * (d / 4 + 1 - d) for p, d in zip(plain, divided, strict=True)], rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 0.5, "mscale_all_dim": 2.0}, (0.05 * math.log(4) + 1) / (0.2 * math.log(4) + 1)),
        ({"mscale": 0.5}, 0.1 * math.log(4) + 1),
    ],
)
def test_yarn_attention_scale(fields, scale):
    rope = RopeConfig(**{"factor": 4.0, **fields}, theta=100.0, rotary_dim=8, kind="yarn", original_max_len=64)
    assert attention_scale(rope, 64) == pytest.approx(scale)
    assert table(rope, 2)[0][0, 0] == pytest.approx(scale)  # cos 0


def test_scores_depend_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 8)).astype(np.float32)
    cos, sin = table(RopeConfig(50.0, 8), 40)

    def score(i: int, j: int) -> float:
        return float(apply_rope(jnp.asarray(q), cos[i], sin[i]) @ apply_rope(jnp.asarray(k), cos[j], sin[j]))

    assert score(9, 4) == pytest.approx(score(39, 34), abs=1e-5)
    assert abs(score(9, 4) - score(4, 9)) > 1e-3


def test_apply_rope_keeps_dtype_and_rounds_once():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 2, 8)), jnp.bfloat16)
    cos, sin = (t[:5, None] for t in table(RopeConfig(50.0, 8), 5))
    out = apply_rope(x, cos, sin)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, apply_rope(x.astype(jnp.float32), cos, sin).astype(jnp.bfloat16))


def test_unsupported_kind():
    with pytest.raises(ValueError, match="mrope"):
        inv_freq(RopeConfig(100.0, 8, "mrope"), 1)


@pytest.mark.parity
@pytest.mark.parametrize("length", [40, 64, 65, 200])
@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("default", {}),
        ("linear", {"factor": 3.0}),
        ("dynamic", {"factor": 3.0}),
        ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("yarn", {"factor": 4.0}),
        ("yarn", {"factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}),
        ("yarn", {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.4}),
        ("yarn", {"factor": 4.0, "attention_factor": 0.9}),
        ("longrope", {"short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]}),
    ],
)
def test_tables_match_transformers(kind, extra, length):
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from jaxsqueeze.models.families import config_from_hf

    params = {"rope_type": kind, "rope_theta": 700.0, **extra}
    if kind in ("llama3", "yarn", "longrope"):
        params["original_max_position_embeddings"] = 64
    max_position = 64 if kind in ("default", "linear", "dynamic") else 256
    hf = LlamaConfig(
        hidden_size=40, num_attention_heads=5, head_dim=12, max_position_embeddings=max_position, rope_parameters=params
    )
    theirs = LlamaRotaryEmbedding(hf)(torch.zeros(1), torch.arange(length)[None])
    cfg = config_from_hf({**hf.to_dict(), "architectures": ["LlamaForCausalLM"]})
    for ours, reference in zip(table(cfg.ropes[0], length), theirs, strict=True):
        np.testing.assert_allclose(ours, reference[0, :, :6].numpy(), atol=3e-5)
