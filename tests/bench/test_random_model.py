"""Random arrays and models: of the asked shape, size and spread, with no place left alone, large or small."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsqueeze.bench import random_arrays, random_model


@pytest.fixture(params=[random_arrays.BLOCK, 1009], ids=["one block", "repeated"])
def block(request, monkeypatch):
    """The size of the block that large arrays repeat: here some of them are large."""
    monkeypatch.setattr(random_arrays, "BLOCK", request.param)
    for cached in (random_arrays._normal_block, random_arrays._code_block):
        cached.cache_clear()
    jax.clear_caches()
    yield request.param
    for cached in (random_arrays._normal_block, random_arrays._code_block):
        cached.cache_clear()
    jax.clear_caches()


def test_normal_values(block):
    x = np.asarray(random_arrays.values(3, (64, 128), jnp.float32, 0.5))
    assert abs(x.mean()) < 0.03
    assert abs(x.std() - 0.5) < 0.03
    assert not np.array_equal(x[0], x[1])
    assert not np.array_equal(x, random_arrays.values(4, (64, 128), jnp.float32, 0.5))
    assert random_arrays.values(3, (64, 128), jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_codes_take_all_values(block, dtype):
    x = np.asarray(random_arrays.values(3, (64, 128), dtype))
    assert x.dtype == dtype
    assert len(np.unique(x)) > 240
    assert not np.array_equal(x[0], x[1])


def test_codes_of_fp8_are_finite(block):
    x = np.asarray(random_arrays.values(3, (64, 128), jnp.float8_e4m3fn).astype(jnp.float32))
    assert np.isfinite(x).all()
    assert abs(x.std() - 1) < 0.1


@pytest.mark.parametrize("format", ["int8", "int4", "int2", "fp8", "w8a8"])
def test_quantised_weights_stand_for_weights_of_the_usual_size(format):
    params = random_model.make(random_model.SHAPES["tiny"], jnp.dtype(jnp.float32), format)
    weight = params["layers_0"]["mlp"]["down"]["weight"]
    assert weight.format == format
    values = weight.dequantise()
    assert abs(float(values.std()) / random_model.STD - 1) < 0.1
    assert isinstance(params["embed"]["weight"], jax.Array)  # it is looked up


def test_shapes_are_those_of_the_models():
    """Parameters as the model cards count them: 8.03 and 1.24 billion."""
    counts = {}
    for name in ("llama-8b", "llama-1b"):
        shapes = random_model.abstract(random_model.SHAPES[name], jnp.dtype(jnp.bfloat16), None)
        counts[name] = sum(x.size for x in jax.tree.leaves(shapes))
    assert round(counts["llama-8b"] / 1e9, 2) == 8.03
    assert round(counts["llama-1b"] / 1e9, 2) == 1.24


def test_a_step_reads_all_weights_but_an_embedding_that_is_looked_up():
    untied = random_model.make(random_model.SHAPES["tiny"], jnp.dtype(jnp.float32), None)
    total = sum(x.nbytes for x in jax.tree.leaves(untied))
    assert random_model.step_bytes(untied) == total - 256 * 64 * 4
    tied = {name: x for name, x in untied.items() if name != "lm_head"}
    assert random_model.step_bytes(tied) == total - 256 * 64 * 4
