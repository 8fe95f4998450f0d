"""What every implementation of kv_write has to do. Subclass and give ``write``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.kv_write.problem import Problem
from tests.kernels.properties import PROPERTY

TOPS = {"int8": 127, "int4": 7}


def check_codes(x_D: np.ndarray, codes_D: np.ndarray, scale: np.float32, top: int) -> None:
    """The definition: code = x / scale rounded to nearest (f32 division may fall either way at a tie), scale =
    max|x| / top, codes within +-top."""
    x_D = x_D.astype(np.float64)
    np.testing.assert_allclose(scale, np.abs(x_D).max() / top, rtol=3e-7)
    assert np.abs(codes_D).max() <= top
    np.testing.assert_array_less(np.abs(codes_D - x_D / (scale or 1)), 0.5 + 1e-4)


def unpack(codes_W: np.ndarray, format: str) -> np.ndarray:
    if format == "int8":
        return codes_W.astype(int)
    return np.concatenate([codes_W & 15, codes_W >> 4]).astype(int) - 8


class KVWriteBody:
    formats = ("same", "int8", "int4")
    exact = "same"  # the format that keeps bf16 bits as they are

    def write(self, problem: Problem, *arrays: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        raise NotImplementedError

    def check(self, problem: Problem, new: np.ndarray, places: list[int], pages: int, seed: int) -> None:
        """Tokens beyond ``places`` name page 0, some at the same place; all other places stay as they were."""
        p, rng = problem, np.random.default_rng(seed)
        pool, scales, *_ = p.inputs(pages)
        codes = rng.normal(scale=100, size=pool.shape).astype(np.int8).astype(pool.dtype)
        old_scales = None if scales is None else rng.random(scales.shape, np.float32)
        page, offset = np.zeros(p.T, np.int32), np.zeros(p.T, np.int32)
        for token, place in zip(rng.permutation(p.T), places, strict=False):
            page[token], offset[token] = divmod(place, p.page_size)
        written, new_scales = self.write(
            p,
            jnp.asarray(codes),
            None if old_scales is None else jnp.asarray(old_scales),
            jnp.asarray(new),
            jnp.asarray(page),
            jnp.asarray(offset),
        )
        written = np.asarray(written)
        assert written.dtype == codes.dtype
        kept = np.ones(written.shape[:1] + written.shape[2:3], bool)
        kept[0] = False
        for t in range(p.T):
            if page[t] == 0:
                continue
            kept[page[t], offset[t]] = False
            for k in range(p.K):
                got = written[page[t], k, offset[t]]
                if p.format in TOPS:
                    scale = np.asarray(new_scales)[page[t], k, offset[t]]
                    check_codes(new[t, k], unpack(got, p.format), scale, TOPS[p.format])
                else:
                    assert got.tobytes() == new[t, k].tobytes()
        for page_, offset_ in np.argwhere(kept):
            assert written[page_, :, offset_].tobytes() == codes[page_, :, offset_].tobytes()
            if scales is not None:
                np.testing.assert_array_equal(new_scales[page_, :, offset_], old_scales[page_, :, offset_])

    @pytest.mark.parametrize(
        ("D", "dtype"), [(64, "float32"), (80, "bfloat16"), (96, "float16"), (128, "bfloat16"), (256, "float32")]
    )
    def test_sizes(self, dtype, D):
        for format in self.formats:
            problem = Problem(T=5, K=3, D=D, page_size=4, dtype=dtype, format=format)
            new = np.random.default_rng(D).normal(size=(5, 3, D)).astype(dtype)
            self.check(problem, new, [4, 7, 8, 21], pages=6, seed=D)

    @PROPERTY
    @given(
        seed=st.integers(0, 2**32 - 1),
        tokens=st.integers(0, 7),
        heads=st.sampled_from([1, 3, 8]),
        places=st.lists(st.integers(4, 23), max_size=7, unique=True),
        format_=st.integers(0, 2),
        power=st.sampled_from([-30, 0, 30]),
    )
    def test_equals_the_definition(self, seed, tokens, heads, places, format_, power):
        format = self.formats[format_ % len(self.formats)]
        problem = Problem(T=tokens, K=heads, D=6, page_size=4, dtype="float32", format=format)
        rng = np.random.default_rng(seed)
        new = (rng.normal(size=(tokens, heads, 6)) * 10.0**power).astype(np.float32)
        new[rng.random(new.shape) < 0.2] = 0
        self.check(problem, new, places, pages=6, seed=seed)

    @pytest.mark.parametrize("format", list(TOPS))
    def test_zeros_stay_zeros_and_outliers_do_not_wrap(self, format):
        """An all-zero head, then one value a thousand times the others."""
        problem = Problem(T=2, K=1, D=8, page_size=4, dtype="float32", format=format)
        new = np.zeros((2, 1, 8), np.float32)
        new[1] = 1.0
        new[1, 0, 5] = -1000.0
        self.check(problem, new, [4, 5], pages=2, seed=0)

    @pytest.mark.parametrize(("format", "ends"), [("int8", 180), ("int4", 10)])
    def test_codes_of_denormals_stop_at_the_ends(self, format, ends):
        """Their scale, 1.4 of the smallest number, is rounded down to one, or is zero where denormals are."""
        problem = Problem(T=1, K=1, D=8, page_size=4, dtype="float32", format=format)
        pool, scales, *_ = problem.inputs()
        new = np.full((1, 1, 8), ends * 2.0**-149, np.float32) * np.array([1, -1] * 4, np.float32)
        one = jnp.ones(1, jnp.int32)
        arrays = jnp.zeros(pool.shape, pool.dtype), jnp.zeros(scales.shape), jnp.asarray(new), one, one
        pages, _ = self.write(problem, *arrays)
        codes = unpack(np.asarray(pages)[1, 0, 1], format)
        assert codes.tolist() in ([TOPS[format], -TOPS[format]] * 4, [0] * 8)

    def test_bits_survive_whatever_they_mean(self):
        """NaN payloads, infinities, negative zero and denormals are copied bit by bit."""
        bits = np.array([0x7FC1, 0xFF80, 0x8000, 0x0001, 0x3F80], np.uint16)
        new = np.tile(bits, (7, 3, 1)).view(ml_dtypes.bfloat16)
        problem = Problem(T=7, K=3, D=5, page_size=8, dtype="bfloat16", format=self.exact)
        self.check(problem, new, list(range(8, 15)), pages=2, seed=0)
