"""The one decoder: a stack of attention and MLP blocks driven by ModelConfig.

Pure function of (params, tokens, pool, rows): KV pool in, KV pool out. Layers are unrolled and read their own arrays;
``lax.scan`` over stacked weights would copy each layer's weights every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxsqueeze.kv.pool import KVPool, Storage, abstract_pool
from jaxsqueeze.models.attention import Attention, GroupPages, QueryRows
from jaxsqueeze.models.config import LayerConfig, ModelConfig
from jaxsqueeze.models.layers import Embedding, GatedMLP, RMSNorm
from jaxsqueeze.models.rope import cos_sin
from pallas_kernels.target import CPU, Target

Params = dict[str, Any]
Variables = dict[str, Any]  # {"params": Params, "views": see runner/views.py}


class Block(nn.Module):
    """Pre-norm residual block; ``post_norms`` adds Gemma's norms before each residual add."""

    cfg: ModelConfig
    layer: LayerConfig
    group: int  # index of the layer's cache group
    dtype: jnp.dtype
    target: Target

    @nn.compact
    def __call__(self, x_TH, k_pages, v_pages, rows, ropes):
        c, layer = self.cfg, self.layer

        def norm(name: str) -> RMSNorm:
            return RMSNorm(c.hidden_size, c.norm_eps, self.dtype, name=name)

        def add(x: jax.Array, y: jax.Array) -> jax.Array:
            return (x + y.astype(jnp.float32)).astype(self.dtype)

        rope = None if layer.rope is None else ropes[layer.rope]
        with jax.named_scope("attention"):
            attn = Attention(c, layer, self.group, self.dtype, self.target, name="attn")
            y, k_pages, v_pages = attn(norm("input_norm")(x_TH), k_pages, v_pages, rows, rope)
            x_TH = add(x_TH, norm("post_attn_norm")(y) if c.post_norms else y)
        with jax.named_scope("mlp"):
            sizes = c.hidden_size, c.intermediate_size
            mlp = GatedMLP(*sizes, c.activation, self.dtype, self.target, c.mlp_bias, name="mlp")
            y = mlp(norm("mlp_norm")(x_TH))
            x_TH = add(x_TH, norm("post_mlp_norm")(y) if c.post_norms else y)
        return x_TH, k_pages, v_pages


@functools.lru_cache
def _traced_once(
    cfg: ModelConfig, layer: LayerConfig, group: int, dtype: jnp.dtype, target: Target
) -> Callable[..., Any]:
    """Equal layers share one trace: a deep model traces and lowers in the time of its distinct layers."""
    block = Block(cfg, layer, group, dtype, target, parent=None)
    return jax.jit(block.apply)


class Decoder(nn.Module):
    """``max_len`` fixes the rope frequencies: one set per server (see models/rope.py); ``target``: what its programs
    run on."""

    cfg: ModelConfig
    dtype: jnp.dtype
    max_len: int
    target: Target

    def setup(self) -> None:
        c = self.cfg
        group_of = {i: g for g, group in enumerate(c.cache_groups()) for i in group.layers}
        self.embed = Embedding(c.vocab_size, c.hidden_size, self.dtype, self.target)
        self.layers = [Block(c, layer, group_of[i], self.dtype, self.target) for i, layer in enumerate(c.layers)]
        self.final_norm = RMSNorm(c.hidden_size, c.norm_eps, self.dtype)
        if not c.tie_embeddings:
            self.lm_head = Embedding(c.vocab_size, c.hidden_size, self.dtype, self.target)

    def __call__(self, tokens_T: jax.Array, pool: KVPool, rows: tuple[QueryRows, ...]) -> tuple[jax.Array, KVPool]:
        """Final hidden states [T, H] and the pool with the tokens' keys and values written."""
        c = self.cfg
        with jax.named_scope("embed"):
            x_TH = self.embed(tokens_T)
            if c.embed_scale != 1.0:
                x_TH = x_TH * jnp.asarray(c.embed_scale, self.dtype)
        positions_T = jnp.concatenate([r.positions.reshape(-1) for r in rows])
        with jax.named_scope("rope"):
            ropes = [cos_sin(rope, self.max_len, positions_T) for rope in c.ropes]
        k, v = list(pool.k), list(pool.v)
        for i, block in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                args = x_TH, k[i], v[i], rows, ropes
                if self.is_initializing():
                    x_TH, k[i], v[i] = block(*args)
                else:
                    shared = _traced_once(c, block.layer, block.group, self.dtype, self.target)
                    x_TH, k[i], v[i] = shared(block.variables, *args)
        return self.final_norm(x_TH), KVPool(tuple(k), tuple(v))

    def unembed(self, x_TH: jax.Array) -> jax.Array:
        """Logits f32[T, V]."""
        c = self.cfg
        with jax.named_scope("lm_head"):
            logits = (self.embed if c.tie_embeddings else self.lm_head).unembed(x_TH)
            if c.final_softcap is not None:
                logits = c.final_softcap * jnp.tanh(logits / c.final_softcap)
            return logits

    def init_all(self, tokens_T, pool, rows):
        """Touches every parameter, for ``init``."""
        x, pool = self(tokens_T, pool, rows)
        return self.unembed(x), pool


def abstract_params(cfg: ModelConfig, dtype: jnp.dtype) -> Params:
    """The parameter tree as ShapeDtypeStructs boxed with logical axis names. The converter and the loader know the same
    shapes without a device (families/rules.py)."""
    groups = cfg.cache_groups()
    pages = GroupPages(jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32))
    rows = (QueryRows(jax.ShapeDtypeStruct((1, 1), jnp.int32), (pages,) * len(groups)),)
    pool = abstract_pool(cfg, (2,) * len(groups), 1, Storage(dtype, dtype, dtype))
    model = Decoder(cfg, dtype, max_len=1, target=CPU)

    def init(tokens, pool, rows):
        return model.init(jax.random.key(0), tokens, pool, rows, method=Decoder.init_all)["params"]

    return jax.eval_shape(init, jax.ShapeDtypeStruct((1,), jnp.int32), pool, rows)
