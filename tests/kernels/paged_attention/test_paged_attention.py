"""Paged attention, each implementation against dense attention in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention import triton as triton_kernel
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.target import CPU
from tests.kernels.interpreter import interpret
from tests.kernels.paged_attention.body import PagedAttentionBody

REFERENCE = jax.jit(reference.run, static_argnums=0)


class TestReference(PagedAttentionBody):
    junk_in_v = 99.0
    same = "bits"

    def attend(self, problem, *arrays):
        return REFERENCE(problem, *arrays)


class TestTriton(PagedAttentionBody):
    tile = {"m": 16, "t": 32, "splits": 1, "warps": 4, "stages": 2}

    def attend(self, problem, *arrays):
        return triton_kernel.run(problem, self.tile, interpret, *arrays)


class TestTritonSplit(TestTriton):
    tile = {"m": 32, "t": 16, "splits": 3, "warps": 4, "stages": 2}


def test_what_does_not_fit_is_refused():
    q = jnp.zeros((1, 1, 2, 1, 8))
    pages = jnp.zeros((3, 2, 4, 8))
    rows = jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="does not fit q"):
        paged_attention(q, pages[:, :1], pages[:, :1], *rows, scale=1.0, target=CPU)
    with pytest.raises(ValueError, match="does not fit q"):
        paged_attention(q, pages[..., :4], pages[..., :4], *rows, scale=1.0, target=CPU)
    with pytest.raises(ValueError, match="window must be >= 1, got 0"):
        paged_attention(q, pages, pages, *rows, scale=1.0, window=0, target=CPU)
    with pytest.raises(ValueError, match="softcap must be > 0, got 0"):
        paged_attention(q, pages, pages, *rows, scale=1.0, softcap=0.0, target=CPU)
    with pytest.raises(ValueError, match="need"):
        paged_attention(q, pages.astype(jnp.int8), pages, *rows, scale=1.0, target=CPU)
