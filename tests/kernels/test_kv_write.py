"""KV writes against a loop over tokens, in float32 and in bfloat16 kept as bit patterns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_write.api import kv_write

WRITE = jax.jit(kv_write)
PAGES, K, PAGE, D, T = 6, 3, 4, 5, 7


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    places=st.lists(st.integers(PAGE, PAGES * PAGE - 1), min_size=0, max_size=T, unique=True),
    bits=st.booleans(),
)
def test_equals_a_loop(seed, places, bits):
    """Tokens that must not be kept all name page 0, some of them at the same place; the rest stay where they are."""
    rng = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if bits else np.float32
    pool, new = (rng.normal(size=s).astype(kind) for s in ((PAGES, K, PAGE, D), (T, K, D)))
    order = rng.permutation(T)
    page, offset = np.zeros(T, np.int32), np.zeros(T, np.int32)
    right = pool.copy()
    for token, place in zip(order, places, strict=False):
        page[token], offset[token] = divmod(place, PAGE)
        right[page[token], :, offset[token]] = new[token]
    given_pool = jnp.asarray(pool.view(np.uint16) if bits else pool)
    ours = np.asarray(WRITE(given_pool, jnp.asarray(new), jnp.asarray(page), jnp.asarray(offset)))
    if bits:
        assert ours.dtype == np.uint16
        ours = ours.view(kind)
    np.testing.assert_array_equal(ours[1:], right[1:])


def test_bits_survive_whatever_they_mean():
    """NaN payloads, infinities, negative zero and denormals are copied bit by bit."""
    bits = np.array([0x7FC1, 0xFF80, 0x8000, 0x0001, 0x3F80], np.uint16)
    new = np.tile(bits, (T, K, 1)).view(ml_dtypes.bfloat16)
    page, offset = np.full(T, 2, np.int32), np.arange(T, dtype=np.int32) % PAGE
    out = WRITE(jnp.zeros((PAGES, K, PAGE, D), jnp.uint16), jnp.asarray(new), jnp.asarray(page), jnp.asarray(offset))
    np.testing.assert_array_equal(np.asarray(out)[2], np.broadcast_to(bits, (K, PAGE, D)))


def test_what_does_not_fit_is_refused():
    where = jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="does not fit pages"):
        kv_write(jnp.zeros((2, 3, 4, 5)), jnp.zeros((2, 3, 6)), *where)
    with pytest.raises(ValueError, match="does not fit pages"):
        kv_write(jnp.zeros((2, 3, 4, 5)), jnp.zeros((2, 2, 5)), *where)
