"""Device page pools: per cache group, K and V pages of each of its layers.

One array per layer, ``[pages, kv_heads, page_size, head_dim]``: a layer is written in place and read without slicing
a stacked array. Page 0 is the trash page: masked tokens write there and no table entry in use points at it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxsqueeze.models.config import ModelConfig


@struct.dataclass
class KVPool:
    """``k[layer]``, ``v[layer]``: [pages of the layer's group, K, page_size, D], the storage type."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """XLA:CPU scatters integers in place but not bf16, so there the pool holds bf16 bit patterns."""
    return jnp.dtype(jnp.uint16) if platform == "cpu" and dtype == jnp.bfloat16 else jnp.dtype(dtype)


def kv_bytes_per_page(cfg: ModelConfig, num_layers: int, page_size: int, dtype: jnp.dtype) -> int:
    """K and V bytes of one page of a group of ``num_layers`` layers."""
    return 2 * num_layers * page_size * cfg.num_kv_heads * cfg.head_dim * np.dtype(dtype).itemsize


def abstract_pool(cfg: ModelConfig, num_pages: tuple[int, ...], page_size: int, dtype: jnp.dtype) -> KVPool:
    """Shapes only. ``num_pages``: one count per cache group, page 0 included. ``dtype``: the storage type."""
    pages_of_layer = {i: n for g, n in zip(cfg.cache_groups(), num_pages, strict=True) for i in g.layers}
    layers = tuple(
        jax.ShapeDtypeStruct((pages_of_layer[i], cfg.num_kv_heads, page_size, cfg.head_dim), dtype)
        for i in range(cfg.num_layers)
    )
    return KVPool(k=layers, v=layers)


def allocate(abstract: KVPool) -> KVPool:
    """Zeroed pool: pages never read before written, but a NaN bit pattern would survive a masked product."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), abstract)
