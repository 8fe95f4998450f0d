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
    with pytest.raises(ValueError, match="does not fit pages"):
        kv_write(jnp.zeros((2, 3, 4, 5)), None, jnp.zeros((2, 3, 6)), *where, target=CPU)
    with pytest.raises(ValueError, match="does not fit pages"):
        kv_write(jnp.zeros((2, 3, 4, 5)), None, jnp.zeros((2, 2, 5)), *where, target=CPU)
    with pytest.raises(ValueError, match="need scales"):
        kv_write(jnp.zeros((2, 3, 4, 6), jnp.int8), None, jnp.zeros((2, 3, 6)), *where, target=CPU)
    with pytest.raises(ValueError, match="cannot hold"):
        kv_write(jnp.zeros((2, 3, 4, 6), jnp.int32), None, jnp.zeros((2, 3, 6)), *where, target=CPU)
