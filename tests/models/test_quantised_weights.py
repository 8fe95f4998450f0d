"""A model whose weights are QTensors gives what it gives with the weights that those stand for."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jaxsqueeze.kv.pool import Storage, abstract_pool, allocate
from jaxsqueeze.models.attention import GroupPages, QueryRows
from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.decoder import Decoder, Params
from jaxsqueeze.quant.qtensor import quantise
from jaxsqueeze.quant.scheme import Scheme
from pallas_kernels.target import CPU


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def logits(cfg: ModelConfig, params: Params) -> jax.Array:
    """Of a prompt of six tokens, in one page."""
    model = Decoder(cfg, jnp.dtype(jnp.float32), 8, CPU)
    pages = GroupPages(jnp.ones((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    rows = (QueryRows(jnp.arange(6)[None], (pages,) * len(cfg.cache_groups())),)
    pool = allocate(abstract_pool(cfg, (2,) * len(cfg.cache_groups()), 8, Storage(*[jnp.dtype(jnp.float32)] * 3)))
    x, _ = model.apply({"params": params}, jnp.arange(6), pool, rows)
    return model.apply({"params": params}, x, method=Decoder.unembed)


@pytest.mark.parametrize("scheme", [Scheme("int8"), Scheme("int4", 32, True, "float16"), Scheme("int2", 32)], ids=str)
def test_logits_are_those_of_the_expanded_weights(scheme, golden_named):
    golden = golden_named("llama")
    flat = traverse_util.flatten_dict(golden.params)
    quantised, plain = {}, {}
    for path, weight in flat.items():
        matrix = path[-1] == "weight" and path[0] != "embed"
        quantised[path] = quantise(jnp.asarray(weight), scheme) if matrix else weight
        plain[path] = quantised[path].dequantise() if matrix else weight
    left, right = (logits(golden.cfg, traverse_util.unflatten_dict(p)) for p in (quantised, plain))
    assert np.linalg.norm(left - right) / np.linalg.norm(right) < 1e-5
    assert np.linalg.norm(left - logits(golden.cfg, golden.params)) / np.linalg.norm(right) > 1e-3
