"""Paged attention, each implementation against dense attention in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention import triton as triton_kernel
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.target import CPU, H200
from tests.kernels.interpreter import interpret
from tests.kernels.paged_attention.body import BOUNDS, PagedAttentionBody, problem
from tests.kernels.paged_attention.build import decode

REFERENCE = jax.jit(reference.run, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})


class TestReference(PagedAttentionBody):
    junk_in_v = 99.0
    same = "bits"

    def attend(self, problem, *arrays):
        return REFERENCE(problem, *arrays)


class TestTriton(PagedAttentionBody):
    m, t, splits = 16, 32, 1

    def attend(self, problem, *arrays):
        tile = {"m": self.m, "t": self.t, "splits": self.splits, "warps": 4, "stages": 2}
        return triton_kernel.run(problem, tile, interpret, *arrays)


class TestTritonSplit(TestTriton):
    m, t, splits = 32, 16, 3
    test_formats = test_head_sizes = None  # as with one split


def test_every_candidate_tile():
    """Long table, short row: some splits have no keys."""
    case = problem(1, 2, 2, 2, 32, 16, 48, "bfloat16", "int8", scale=32**-0.5, window=600)
    arrays, right = decode(case, [75]).arrays()
    tiles = triton_kernel.tiles(case, H200)
    assert len({tile["splits"] for tile in tiles}) > 1
    for tile in tiles:
        out = np.asarray(triton_kernel.run(case, tile, interpret, *arrays), np.float64)
        assert np.linalg.norm(out - right) <= BOUNDS[case.dtype] * np.linalg.norm(right)


def test_a_context_is_split_where_rows_are_few():
    def splits(N: int, P: int, **options) -> int:
        return triton_kernel.tiles(problem(N, 1, 8, 4, 128, 16, P, "bfloat16", **options), H200)[0]["splits"]

    assert splits(1, 512) > splits(8, 512) > splits(64, 512) == 1
    assert splits(1, 512) > splits(1, 128) > splits(1, 16) == 1
    assert splits(1, 512, window=256) == 1


def test_what_triton_does_not_cover():
    with pytest.raises(NotImplementedError, match="bit patterns"):
        triton_kernel.tiles(problem(1, 1, 1, 1, 8, 4, 7, k="bits"), H200)
    with pytest.raises(NotImplementedError, match="whole heads of 10"):
        triton_kernel.tiles(problem(1, 1, 1, 1, 10, 4, 7, v="int4"), H200)


def test_what_does_not_fit_is_refused():
    q = jnp.zeros((1, 1, 2, 1, 8))
    pages = jnp.zeros((3, 2, 4, 8))
    rows = jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match=r"k_pages should be float32\[3, 2, 4, 8\], got float32\[3, 1, 4, 8\]"):
        paged_attention(q, pages[:, :1], pages[:, :1], *rows, scale=1.0, target=CPU)
    with pytest.raises(ValueError, match="k_pages should be"):
        paged_attention(q, pages[..., :4], pages[..., :4], *rows, scale=1.0, target=CPU)
    with pytest.raises(ValueError, match="window must be >= 1, got 0"):
        paged_attention(q, pages, pages, *rows, scale=1.0, window=0, target=CPU)
    with pytest.raises(ValueError, match="softcap must be > 0, got 0"):
        paged_attention(q, pages, pages, *rows, scale=1.0, softcap=0.0, target=CPU)
    with pytest.raises(ValueError, match=r"sinks should be float32\[2, 1\], got bfloat16"):
        paged_attention(q, pages, pages, *rows, scale=1.0, sinks=jnp.zeros((2, 1), jnp.bfloat16), target=CPU)
    with pytest.raises(ValueError, match="base should be int32"):
        paged_attention(q, pages, pages, rows[0], rows[1].astype(float), rows[2], scale=1.0, target=CPU)
    with pytest.raises(ValueError, match="pages of int8 and float32: k_scales should be"):
        paged_attention(q, pages.astype(jnp.int8), pages, *rows, scale=1.0, target=CPU)
