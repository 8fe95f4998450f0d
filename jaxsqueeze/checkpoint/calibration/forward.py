"""Decoder layers run one by one over the windows of a text, as served: each through pages of its own.

Hidden states of all windows, f32[n, length, H], stay on the host; a few windows at a time are on the device. Equal
layers share their compiled programs. Activations are f32 throughout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct

from jaxsqueeze.checkpoint.calibration.text import ROWS
from jaxsqueeze.config import KVDtypes
from jaxsqueeze.kv.pool import abstract_pages, storage
from jaxsqueeze.models.attention import GroupPages, QueryRows
from jaxsqueeze.models.config import LayerConfig, ModelConfig
from jaxsqueeze.models.decoder import Block
from jaxsqueeze.models.layers import Linear
from jaxsqueeze.models.rope import cos_sin
from pallas_kernels.target import Target

PAGE = 16
_DTYPE = jnp.dtype(jnp.float32)


@struct.dataclass
class Statistics:
    """Sums over the tokens that a matmul saw as its input x."""

    moments: jax.Array  # f32[in, in] of x x^T
    magnitude: jax.Array  # f32[in] of |x|


def statistics(
    cfg: ModelConfig,
    layer: LayerConfig,
    params: dict[str, Any],
    hidden: np.ndarray,
    names: tuple[str, ...],
    tick: Callable[[], None],
) -> dict[str, Statistics]:
    """Of the inputs of the layer's matmuls ``names`` ("attn/qkv"). ``tick`` is called after every few windows."""
    sums = None
    for start in range(0, len(hidden), ROWS):
        found = _observe(cfg, layer, names, params, hidden[start : start + ROWS])
        sums = found if sums is None else _add(sums, found)
        jax.block_until_ready(sums)
        tick()
    return sums


def advance(
    cfg: ModelConfig, layer: LayerConfig, params: dict[str, Any], hidden: np.ndarray, tick: Callable[[], None]
) -> None:
    """Replaces ``hidden`` by the layer's outputs, in place."""
    for start in range(0, len(hidden), ROWS):
        part = slice(start, start + ROWS)
        hidden[part] = _run(cfg, layer, params, hidden[part])
        tick()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _observe(
    cfg: ModelConfig, layer: LayerConfig, names: tuple[str, ...], params: dict[str, Any], hidden: jax.Array
) -> dict[str, Statistics]:
    found = {}

    def watch(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        name = "/".join(context.module.path)
        if isinstance(context.module, Linear) and context.method_name == "__call__" and name in names:
            (x_TI,) = args
            moments = jax.lax.dot_general(x_TI, x_TI, (((0,), (0,)), ((), ())), precision="highest")
            found[name] = Statistics(moments, jnp.sum(jnp.abs(x_TI), axis=0))
        return call(*args, **kwargs)

    with nn.intercept_methods(watch):
        _forward(cfg, layer, params, hidden)
    return found


@functools.partial(jax.jit, donate_argnums=0)
def _add(sums: dict[str, Statistics], more: dict[str, Statistics]) -> dict[str, Statistics]:
    return jax.tree.map(jnp.add, sums, more)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(cfg: ModelConfig, layer: LayerConfig, params: dict[str, Any], hidden: jax.Array) -> jax.Array:
    return _forward(cfg, layer, params, hidden)


def _forward(cfg: ModelConfig, layer: LayerConfig, params: dict[str, Any], hidden: jax.Array) -> jax.Array:
    """The layer's output for ``hidden`` f32[rows, length, H]."""
    rows, length, _ = hidden.shape
    target = Target.of(jax.devices()[0])
    width = -(-length // PAGE)
    table = 1 + jnp.arange(rows * width, dtype=jnp.int32).reshape(rows, width)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    queries = QueryRows(positions, (GroupPages(table, jnp.zeros(rows, jnp.int32)),))
    stored = storage(KVDtypes(), _DTYPE, target.platform)
    k, v = (
        jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), abstract_pages(cfg, rows * width + 1, PAGE, kind, _DTYPE))
        for kind in stored[:2]
    )
    ropes = [cos_sin(rope, length, positions.reshape(-1)) for rope in cfg.ropes]
    block = Block(cfg, layer, 0, _DTYPE, target)
    x, _, _ = block.apply({"params": params}, hidden.reshape(rows * length, -1), k, v, (queries,), ropes)
    return x.reshape(hidden.shape)
