"""Inputs and weights of a layer as models have them: correlated inputs of very different sizes, one of them always 0,
and weights with heavy tails; and what a rounded weight costs, in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxsqueeze.quant.scheme import Scheme
from pallas_kernels.quant_matmul import packing

SCHEMES = [
    Scheme("int8"),
    Scheme("fp8"),
    Scheme("int4", 32, scale_dtype="float16"),
    Scheme("int4", 64, True, "float16"),
    Scheme("int2", 32, True, "float16"),
]


def inputs(width: int, count: int = 500) -> np.ndarray:
    """f64[count, width]."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, width)) @ (np.eye(width) + 0.5 * rng.normal(size=(width, width)) / np.sqrt(width))
    x *= rng.lognormal(0, 1, width)
    x[:, 1] = 0
    return x


def weights(out: int, width: int) -> np.ndarray:
    return np.random.default_rng(1).standard_t(4, size=(out, width)).astype(np.float32)


def dequantised(arrays, scheme: Scheme, width: int) -> np.ndarray:
    return np.asarray(packing.dequantise(*arrays, scheme.format, width), np.float64)


def assert_nearest(arrays, weight: np.ndarray, scheme: Scheme) -> None:
    """(codes, scales, zeros) are those of ``weight`` rounded to nearest."""
    dtype = jnp.dtype(scheme.scale_dtype)
    right = packing.quantise(jnp.asarray(weight), scheme.format, scheme.group, scheme.zeros, dtype)
    for a, b in zip(arrays, right, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def output_error(found: np.ndarray, weight: np.ndarray, x: np.ndarray) -> float:
    """Share of the outputs' energy."""
    return np.square((found - weight) @ x.T).sum() / np.square(weight @ x.T).sum()
