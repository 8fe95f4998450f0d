"""The compiled decode step updates the donated pool in place: no copy of a layer's pages, whatever the pool's type."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from jaxsqueeze.config import KVDtypes
from jaxsqueeze.kv.pool import abstract_pool, storage
from jaxsqueeze.models.attention import GroupPages
from jaxsqueeze.models.config import LayerConfig, ModelConfig, RopeConfig
from jaxsqueeze.models.decoder import Decoder, abstract_params
from jaxsqueeze.runner.buckets import decode_sizes
from jaxsqueeze.runner.state import initial_state
from jaxsqueeze.runner.steps import DecodeInputs, decode_n
from jaxsqueeze.runner.views import with_views
from pallas_kernels.target import CPU

PAGES, SLOTS = 257, 4
CONFIG = ModelConfig(
    family="llama",
    vocab_size=101,
    hidden_size=24,
    intermediate_size=40,
    num_heads=6,
    num_kv_heads=3,
    head_dim=8,
    layers=(LayerConfig(), LayerConfig(window=5)),
    ropes=(RopeConfig(theta=1e4, rotary_dim=8),),
    max_position=64,
    norm_eps=1e-5,
    attn_scale=0.3,
    tie_embeddings=True,
)


def compiled_decode(rows: int, dtype: jnp.dtype) -> jax.stages.Compiled:
    shape = jax.ShapeDtypeStruct
    pages = GroupPages(shape((rows, 16), jnp.int32), shape((rows,), jnp.int32))
    inputs = DecodeInputs(shape((rows,), jnp.int32), (pages, pages), shape((), jnp.int32))
    pool = abstract_pool(CONFIG, (PAGES, PAGES), 4, storage(KVDtypes(), dtype, "cpu"))
    slot_params, state = jax.eval_shape(lambda: initial_state(SLOTS, CONFIG.vocab_size))
    params = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), nn.unbox(abstract_params(CONFIG, dtype)))
    variables = with_views(params)
    step = jax.jit(functools.partial(decode_n, Decoder(CONFIG, dtype, 64, CPU), 4), donate_argnums=(1, 2))
    return step.lower(variables, pool, state, slot_params, inputs).compile()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_no_layer_of_the_pool_is_copied(name):
    dtype = jnp.dtype(name)
    compiled = compiled_decode(decode_sizes(SLOTS, "cpu", name)[0], dtype)
    of_pool = rf"\[{PAGES},3,4,8\]\S* copy\("
    assert not re.findall(of_pool, compiled.as_text())
    layer_bytes = PAGES * 3 * 4 * 8 * dtype.itemsize
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * layer_bytes, "K and V of both layers are donated"
    assert memory.temp_size_in_bytes < layer_bytes
