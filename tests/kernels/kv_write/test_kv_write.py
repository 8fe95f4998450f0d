"""KV writes, each implementation against the definition, token by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import reference
from pallas_kernels.kv_write import triton as triton_kernel
from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.target import CPU, H200
from tests.kernels.interpreter import interpret
from tests.kernels.kv_write.body import KVWriteBody

REFERENCE = jax.jit(reference.run, static_argnums=0)


class TestReference(KVWriteBody):
    formats = ("same", "bits", "int8", "int4")
    exact = "bits"  # XLA:CPU takes bf16 through f32

    def write(self, problem, *arrays):
        return REFERENCE(problem, *arrays)


class TestTriton(KVWriteBody):
    """Every candidate tile in turn."""

    def write(self, problem, *arrays):
        results = [triton_kernel.run(problem, tile, interpret, *arrays) for tile in triton_kernel.tiles(problem, H200)]
        for other in results[1:]:
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1:], b[1:]), results[0], other)
        return results[0]


def test_what_does_not_fit_is_refused():
    where = jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32)
    pages, codes, new = jnp.zeros((2, 3, 4, 6)), jnp.zeros((2, 3, 4, 6), jnp.int8), jnp.zeros((2, 3, 6))
    with pytest.raises(ValueError, match=r"pages should be float32\[2, 3, 4, 6\], got float32\[2, 3, 4, 5\]"):
        kv_write(pages[..., :5], None, new, *where, target=CPU)
    with pytest.raises(ValueError, match=r"pages should be float32\[2, 2, 4, 6\]"):
        kv_write(pages, None, new[:, :2], *where, target=CPU)
    with pytest.raises(ValueError, match=r"scales should be float32\[2, 3, 4\], got None"):
        kv_write(codes, None, new, *where, target=CPU)
    with pytest.raises(ValueError, match="got float16"):
        kv_write(codes, jnp.zeros((2, 3, 4), jnp.float16), new, *where, target=CPU)
    with pytest.raises(ValueError, match=r"page should be int32\[2\], got int32\[1\]"):
        kv_write(pages, None, new, where[0][:1], where[1], target=CPU)
    with pytest.raises(ValueError, match=r"offset should be int32\[2\], got uint8\[2\]"):
        kv_write(pages, None, new, where[0], where[1].astype(jnp.uint8), target=CPU)
    with pytest.raises(ValueError, match="must be even, got 5"):
        kv_write(jnp.zeros((2, 3, 4, 2), jnp.uint8), jnp.zeros((2, 3, 4)), new[..., :5], *where, target=CPU)
    with pytest.raises(ValueError, match="cannot hold"):
        kv_write(jnp.zeros((2, 3, 4, 6), jnp.int32), None, jnp.zeros((2, 3, 6)), *where, target=CPU)
