"""What every implementation of quant_matmul has to do. Subclass and give ``matmul``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.quant_matmul.problem import Problem
from tests.kernels.properties import PROPERTY

Kind = tuple[str, int, bool]  # format, group, zero points

PER_OUTPUT: list[Kind] = [(format, 0, False) for format in ("bf16", "int8", "fp8", "w8a8")]
PER_GROUP: list[Kind] = [
    *((f, group, z) for f in ("int4", "int2") for group in (32, 64, 128) for z in (False, True)),
    *((f, group, False) for f in ("fp4", "fp8", "int8") for group in (32, 128)),
    ("int8", 32, True),
    ("int8", 64, True),
]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TOKENS = (0, 1, 3, 8, 17, 65)
DTYPES = ("bfloat16", "float32", "float16")


def kinds_of(*formats: str) -> list[Kind]:
    return [kind for kind in PER_OUTPUT + PER_GROUP if kind[0] in formats]


def make_problem(kind: Kind, T: int, out: int, width: int, dtype: str = "bfloat16", scales: str = "float16") -> Problem:
    format, group, zeros = kind
    return Problem(T, out, width, dtype, format, group, zeros, scales if group else "float32")


def random_weight(p: Problem, rng: np.random.Generator) -> list[np.ndarray | None]:
    """Codes of all kinds (of e4m3 no NaN), scales of both signs, zero points that are fractions."""
    _, codes, scales, zeros = p.inputs()
    if p.format == "bf16":
        return [rng.normal(size=codes.shape).astype(codes.dtype), None, None]
    filled = rng.integers(0, 256, codes.shape, np.uint8)
    if p.format == "fp8":
        filled = np.where(filled & 0x7F == 0x7F, 1, filled).astype(np.uint8)
    scaled = (rng.normal(size=scales.shape) * 0.01).astype(scales.dtype)
    if zeros is None:
        return [filled.view(codes.dtype), scaled, None]
    low, high = {"int8": (-128, 127), "int4": (0, 15), "int2": (0, 3)}[p.format]
    return [filled.view(codes.dtype), scaled, rng.uniform(low, high, zeros.shape).astype(zeros.dtype)]


def expanded(p: Problem, codes: np.ndarray, scales: np.ndarray | None, zeros: np.ndarray | None) -> np.ndarray:
    """f64[out, width]: the weight, code by code as documented."""
    if p.group == 0:
        return codes.astype(np.float64) * (1 if scales is None else scales.astype(np.float64)[:, None])
    columns = codes.shape[1]
    weight = np.zeros((p.out, p.width))
    for k in range(p.width):
        value = codes[:, k % columns]
        if codes.dtype == np.uint8:
            bits = {"int4": 4, "fp4": 4, "int2": 2}[p.format]
            value = value >> (bits * (k // columns)) & (2**bits - 1)
        if p.format == "fp4":
            value = E2M1[value & 7] * np.where(value < 8, 1, -1)
        zero = {"int4": 8, "int2": 2}.get(p.format, 0) if zeros is None else zeros[k // p.group].astype(np.float64)
        weight[:, k] = (value.astype(np.float64) - zero) * scales[k // p.group].astype(np.float64)
    return weight


def rounded_tokens(x: np.ndarray) -> np.ndarray:
    """f64: x as w8a8 takes it; defined in f32, so that ties fall as they do there."""
    x = x.astype(np.float32)
    largest = np.abs(x).max(axis=1, keepdims=True, initial=0)
    with np.errstate(all="ignore"):
        inverse = np.float32(127) / largest
        codes = np.round(x * np.where(np.isfinite(inverse), inverse, 0))
    return codes.astype(np.float64) * (largest * np.float32(1 / 127)).astype(np.float64)


class QuantMatmulBody:
    kinds = PER_OUTPUT + PER_GROUP
    most = 300  # tokens
    share = 1  # of so many kinds each test takes one, not always the same: XLA compiles each case

    def matmul(self, problem: Problem, *arrays: jax.Array | None) -> jax.Array:
        raise NotImplementedError

    def bound(self, problem: Problem) -> float:
        """Of ||y - right|| / ||right||: f32 sums."""
        return 2e-6

    def some(self, first: int, of: int = 1) -> list[Kind]:
        return self.kinds[first % (self.share * of) :: self.share * of]

    def multiply(self, p: Problem, *arrays: np.ndarray | None) -> np.ndarray:
        y = self.matmul(p, *(None if a is None else jnp.asarray(a) for a in arrays))
        assert y.shape == (p.T, p.out)
        assert y.dtype == jnp.float32
        return np.asarray(y)

    def check(self, p: Problem, seed: int = 0, x: np.ndarray | None = None) -> None:
        rng = np.random.default_rng(seed)
        weight = random_weight(p, rng)
        if x is None:
            x = rng.normal(size=(p.T, p.width)).astype(p.dtype)
        y, exact = self.multiply(p, x, *weight), expanded(p, *weight)
        right = (rounded_tokens(x) if p.format == "w8a8" else x.astype(np.float64)) @ exact.T
        # Relative to what is summed too: a sum may be nearly zero.
        typical = np.linalg.norm(x.astype(np.float64)) * np.linalg.norm(exact) / np.sqrt(p.width)
        error = np.linalg.norm(y - right)
        assert error <= self.bound(p) * max(np.linalg.norm(right), typical / 10), (p, error / np.linalg.norm(right))

    @pytest.mark.parametrize("case", range(len(TOKENS)), ids=[f"{tokens} tokens" for tokens in TOKENS])
    def test_formats_and_types(self, case):
        """All kinds of weights with all types of x, and of scales."""
        for i, kind in enumerate(self.some(case)):
            dtype, scales = DTYPES[(i + case // 2) % 3], DTYPES[(i // 2 + case) % 3]
            self.check(make_problem(kind, min(TOKENS[case], self.most), 33, 100, dtype, scales), seed=i)

    @pytest.mark.parametrize(("out", "width"), [(1, 1), (1, 257), (7, 31), (65, 129), (3, 600)])
    def test_sizes(self, out, width):
        for i, kind in enumerate(self.some(width, 2)):
            self.check(make_problem(kind, 2, out, width), seed=i)

    def test_each_code_is_its_value(self):
        """Tokens that pick one input each, scales that are powers of two: nothing is rounded but digits of x."""
        for kind in {(format, group > 0): (format, group, z) for format, group, z in self.kinds}.values():
            p = make_problem(kind, min(self.most, 256), 1, 256)
            codes, scales, zeros = random_weight(p, np.random.default_rng(1))
            if p.format != "bf16":
                codes = np.arange(codes.size, dtype=np.uint8).reshape(codes.shape)
                if p.format == "fp8":
                    codes = np.where(codes & 0x7F == 0x7F, 1, codes).astype(np.uint8)
                codes = codes.view(p.storage)
                scales = np.full_like(scales, 0.5)
            if zeros is not None:
                zeros = np.round(zeros)
            first = 3 * p.T if p.T < 256 else 0
            x = np.eye(p.T, 256, first, dtype=ml_dtypes.bfloat16)
            right = expanded(p, codes, scales, zeros)[:, first : first + p.T].T
            np.testing.assert_allclose(self.multiply(p, x, codes, scales, zeros), right, rtol=3e-7, err_msg=str(p))

    @pytest.mark.parametrize(("dtype", "storage"), [("bfloat16", "float32"), ("float16", "bfloat16")])
    def test_weights_of_another_float_type_are_not_rounded(self, dtype, storage):
        """Nor do they overflow x's type."""
        if self.kinds[0][0] == "bf16":
            p = Problem(2, 5, 64, dtype, "bf16", storage=storage)
            rng = np.random.default_rng(0)
            x, weight = rng.normal(size=(2, 64)).astype(dtype), (rng.normal(size=(5, 64)) * 1e6).astype(storage)
            right = x.astype(np.float64) @ weight.astype(np.float64).T
            np.testing.assert_allclose(self.multiply(p, x, weight, None, None), right, rtol=1e-4, atol=10)

    def test_what_lies_beyond_the_inputs_is_not_read(self):
        """Codes of padding are arbitrary, here they would count as a lot."""
        for kind in self.some(0, 2):
            if kind[1]:
                p = make_problem(kind, 3, 5, 40)
                x, codes, scales, zeros = (np.ones(a.shape, a.dtype) if a else None for a in p.inputs())
                codes.view(np.uint8)[:] = 255 if p.parts > 1 else 126
                right = np.tile(expanded(p, codes, scales, zeros).sum(axis=1), (3, 1))
                np.testing.assert_allclose(self.multiply(p, x, codes, scales, zeros), right, rtol=1e-4)

    def test_tokens_of_zeros_and_of_tiny_values(self):
        for kind in self.some(1, 2):
            p = make_problem(kind, 3, 5, 64, "float32")
            x = np.zeros((3, 64), np.float32)
            x[1] = 1e-42
            y = self.multiply(p, x, *random_weight(p, np.random.default_rng(0)))
            np.testing.assert_array_equal(y[[0, 2]], 0)
            np.testing.assert_allclose(y[1], 0, atol=1e-38)

    @PROPERTY
    @given(
        seed=st.integers(0, 2**32 - 1),
        tokens=st.integers(0, 33),
        out=st.integers(1, 9),
        width=st.integers(1, 70),
        kind=st.integers(0, 99),
        dtype=st.sampled_from(DTYPES[:2]),
        power=st.sampled_from([-20, 0, 20]),
    )
    def test_equals_the_float64_sum(self, seed, tokens, out, width, kind, dtype, power):
        if self.share > 2:
            tokens, out, width, dtype = 3, 5, 70, DTYPES[kind % 2]
        kinds = self.some(0, 2)
        x = np.random.default_rng(seed).normal(size=(tokens, width)) * 10.0**power
        x[:, ::3] *= 0
        tokens = min(tokens, self.most)
        self.check(make_problem(kinds[kind % len(kinds)], tokens, out, width, dtype), seed, x.astype(dtype))
