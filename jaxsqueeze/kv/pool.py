"""Device page pools: per cache group, K and V pages of each of its layers.

One array per layer, ``[pages, kv_heads, page_size, W]``: a layer is written in place and read without slicing a
stacked array. K and V are stored apart, each as values (W = head_dim) or as int8 or packed int4 codes with a scale per
token and head; pallas_kernels/kv_write has the layouts. Page 0 is the trash page: masked tokens write there and no
table entry in use points at it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxsqueeze.config import KVDtypes
from jaxsqueeze.models.config import ModelConfig
from pallas_kernels.kv_write.problem import Problem, format_of


@struct.dataclass
class Pages:
    """Keys or values of one layer. Whatever moves pages moves both arrays."""

    data: jax.Array  # [pages, K, page_size, W], the storage type
    scales: jax.Array | None  # f32[pages, K, page_size] of codes


@struct.dataclass
class KVPool:
    """``k[layer]``, ``v[layer]``, with the pages of the layer's group."""

    k: tuple[Pages, ...]
    v: tuple[Pages, ...]


class Storage(NamedTuple):
    """Element types of pages, and of the values in them."""

    k: jnp.dtype
    v: jnp.dtype
    values: jnp.dtype


def storage(kv: KVDtypes, dtype: jnp.dtype, platform: str) -> Storage:
    """How ``kv`` is stored in a model of ``dtype``. XLA:CPU scatters integers in place but not bf16, so there pages of
    bf16 hold bit patterns. Raises ValueError for values of another type than the
    model's."""

    def stored(name: str) -> jnp.dtype:
        codes = {"int8": jnp.int8, "int4": jnp.uint8}
        if name in codes:
            return jnp.dtype(codes[name])
        if name == "bf16" and dtype != jnp.bfloat16:
            raise ValueError(f"a {dtype.name} model cannot keep its KV in bf16: choose auto, int8 or int4")
        return jnp.dtype(jnp.uint16) if platform == "cpu" and dtype == jnp.bfloat16 else dtype

    return Storage(stored(kv.k), stored(kv.v), dtype)


def abstract_pages(cfg: ModelConfig, num_pages: int, page_size: int, stored: jnp.dtype, values: jnp.dtype) -> Pages:
    """Shapes of one layer's keys or values. Raises ValueError for packed codes of an odd head_dim."""
    format = format_of(stored, values)
    if format == "int4" and cfg.head_dim % 2:
        raise ValueError(f"int4 KV packs two values a byte: it does not hold heads of {cfg.head_dim}")
    problem = Problem(0, cfg.num_kv_heads, cfg.head_dim, page_size, values.name, format)
    return Pages(*problem.inputs(num_pages)[:2])


def kv_bytes_per_page(cfg: ModelConfig, num_layers: int, page_size: int, storage: Storage) -> int:
    """K and V bytes of one page of a group of ``num_layers`` layers, scales included."""
    one = [abstract_pages(cfg, 1, page_size, stored, storage.values) for stored in storage[:2]]
    return num_layers * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(one))


def abstract_pool(cfg: ModelConfig, num_pages: tuple[int, ...], page_size: int, storage: Storage) -> KVPool:
    """Shapes only. ``num_pages``: one count per cache group, page 0 included."""
    pages_of_layer = {i: n for g, n in zip(cfg.cache_groups(), num_pages, strict=True) for i in g.layers}

    def layers(stored: jnp.dtype) -> tuple[Pages, ...]:
        counts = (pages_of_layer[i] for i in range(cfg.num_layers))
        return tuple(abstract_pages(cfg, n, page_size, stored, storage.values) for n in counts)

    return KVPool(k=layers(storage.k), v=layers(storage.v))


def allocate(abstract: KVPool) -> KVPool:
    """Zeroed pool: pages never read before written, but a NaN bit pattern would survive a masked product."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), abstract)
