"""A rotation of a matmul's inputs that leaves no outliers among them, so that int8 can hold them.

Some inputs of a language model's layers are always many times larger than the others. A token's int8 codes share one
scale, so those few leave little of the rest. Rotated by an orthogonal matrix, each large input is spread over a block;
the weight's inputs are rotated by the same matrix when it is quantised, so the product stays what it was (QuaRot,
Ashkboos et al. 2024). The matrix is made of Hadamard matrices, which are their own inverses.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import lax

_BLOCK = 64  # inputs; on SmolLM2-135M 512 spread outliers no better, and cost more


def rotate(x: jax.Array) -> jax.Array:
    """f32[..., in] of ``x`` [..., in]: its blocks times an orthonormal Hadamard matrix. Its own inverse. A block is the
    largest power of two, up to 64, that divides the inputs."""
    block = int(np.gcd(x.shape[-1], _BLOCK))
    parts = x.astype(jnp.float32).reshape(-1, block)
    matrix = (scipy.linalg.hadamard(block) / np.sqrt(block)).astype(np.float32)
    return jnp.dot(parts, matrix, precision=lax.Precision.HIGHEST).reshape(x.shape)
