"""Grouped-query attention over the paged pool (Ainslie et al. 2023), with everything the dense families vary:
bias, q/k norm, rope or none, window, soft-cap."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from jaxsqueeze.kv.pool import Pages
from jaxsqueeze.models.config import LayerConfig, ModelConfig
from jaxsqueeze.models.layers import Linear, RMSNorm
from jaxsqueeze.models.rope import apply_rope
from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.target import Target


@struct.dataclass
class GroupPages:
    """Where one cache group's layers find the pages of N query rows."""

    table: jax.Array  # i32[N, P]
    base: jax.Array  # i32[N]


@struct.dataclass
class QueryRows:
    """A rectangle of queries: N rows of Q tokens. Flat tokens are the rows one after another. Position -1: masked."""

    positions: jax.Array  # i32[N, Q]
    groups: tuple[GroupPages, ...]  # one per cache group

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0] * self.positions.shape[1]

    def write_places(self, group: int, page_size: int) -> tuple[jax.Array, jax.Array]:
        """Page and offset of each flat token, page 0 for masked ones: i32[T], i32[T]."""
        pages = self.groups[group]
        column = self.positions // page_size - pages.base[:, None]
        page = jnp.take_along_axis(pages.table, jnp.maximum(column, 0), axis=1, mode="clip")
        page = jnp.where(self.positions >= 0, page, 0)
        return page.reshape(-1), jnp.maximum(self.positions, 0).reshape(-1) % page_size


class Attention(nn.Module):
    cfg: ModelConfig
    layer: LayerConfig
    group: int  # index of the layer's cache group
    dtype: jnp.dtype
    target: Target

    @nn.compact
    def __call__(
        self,
        x_TH: jax.Array,
        k: Pages,
        v: Pages,
        rows: tuple[QueryRows, ...],
        rope: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, Pages, Pages]:
        """Writes the new keys and values, then attends. ``rope``: cos and sin, f32[T, rotary / 2].

        Returns output [T, H] and the layer's updated pages.
        """
        c = self.cfg
        K, G, D = c.num_kv_heads, c.q_per_kv, c.head_dim
        axes = ("kv_heads", "q_and_kv", "head_dim", "hidden")
        qkv = Linear((K, G + 2, D, c.hidden_size), axes, self.dtype, self.target, c.qkv_bias, name="qkv")(x_TH)
        q, new_k, new_v = qkv[:, :, :G], qkv[:, :, G], qkv[:, :, G + 1]
        if c.qk_norm:
            q = RMSNorm(D, c.norm_eps, jnp.float32, name="q_norm")(q)
            new_k = RMSNorm(D, c.norm_eps, jnp.float32, name="k_norm")(new_k)
        if rope is not None:
            cos, sin = rope
            q = apply_rope(q, cos[:, None, None], sin[:, None, None])
            new_k = apply_rope(new_k, cos[:, None], sin[:, None])

        q, new_k, new_v = (a.astype(self.dtype) for a in (q, new_k, new_v))
        # A request that fails must leave nothing in its pages that reaches their next owner: masked weights are zero,
        # and 0 * NaN is NaN. Its own NaN stays in K and in the residual stream, so its logits still tell.
        new_v = jnp.where(jnp.isfinite(new_v), new_v, 0)
        page_size = k.data.shape[2]
        places = [r.write_places(self.group, page_size) for r in rows]
        page, offset = (jnp.concatenate(x) for x in zip(*places, strict=True))
        k = Pages(*kv_write(k.data, k.scales, new_k, page, offset, target=self.target))
        v = Pages(*kv_write(v.data, v.scales, new_v, page, offset, target=self.target))

        outputs, start = [], 0
        for r in rows:
            n, width = r.positions.shape
            pages = r.groups[self.group]
            part = q[start : start + r.num_tokens].reshape(n, width, K, G, D)
            out = paged_attention(
                part,
                k.data,
                v.data,
                pages.table,
                pages.base,
                r.positions,
                scale=c.attn_scale,
                window=self.layer.window,
                softcap=c.attn_softcap,
                k_scales=k.scales,
                v_scales=v.scales,
                target=self.target,
            )
            outputs.append(out.reshape(r.num_tokens, K * G * D))
            start += r.num_tokens
        x = jnp.concatenate(outputs)
        out_axes = ("hidden", "heads")
        o = Linear((c.hidden_size, K * G * D), out_axes, self.dtype, self.target, c.o_bias, name="o")
        return o(x), k, v
