"""Scales of a matmul's inputs moved into what makes those inputs: the layer as a whole computes what it did.

    attn/qkv     its norm's scale
    mlp/gate_up  its norm's scale
    mlp/down     the rows of ``up``: down's input is act(gate) * up
    attn/o       the rows of ``v``: o's input is a weighted mean of v; query heads of one KV head share their scales

Layouts are those of models/families/rules.py; paths are without the layer's name.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxsqueeze.models.config import ModelConfig

MAKERS = {"attn/qkv": "input_norm", "mlp/gate_up": "mlp_norm", "mlp/down": "mlp/gate_up", "attn/o": "attn/qkv"}


def shared(cfg: ModelConfig, name: str, magnitude: jax.Array) -> jax.Array:
    """``magnitude`` f32[in] of the inputs of ``name``, made equal where they must have one scale."""
    if name != "attn/o":
        return magnitude
    heads = magnitude.reshape(cfg.num_kv_heads, cfg.q_per_kv, cfg.head_dim)
    return jnp.broadcast_to(jnp.mean(heads, axis=1, keepdims=True), heads.shape).reshape(-1)


def fold(cfg: ModelConfig, params: dict[str, jax.Array], name: str, scales: jax.Array) -> dict[str, jax.Array]:
    """The layer's f32 parameters with the inputs of ``name`` multiplied by ``scales`` f32[in] (see ``shared``)."""
    params, maker = dict(params), MAKERS[name]
    params[f"{name}/weight"] = params[f"{name}/weight"] * scales
    if maker.endswith("norm"):
        params[f"{maker}/scale"] = params[f"{maker}/scale"] / scales
        return params
    if name == "attn/o":
        rows = (slice(None), cfg.q_per_kv + 1)
        scales = scales.reshape(cfg.num_kv_heads, cfg.q_per_kv, cfg.head_dim)[:, 0]
    else:
        rows = (1,)
    params[f"{maker}/weight"] = params[f"{maker}/weight"].at[rows].divide(scales[..., None])
    if f"{maker}/bias" in params:
        params[f"{maker}/bias"] = params[f"{maker}/bias"].at[rows].divide(scales)
    return params
