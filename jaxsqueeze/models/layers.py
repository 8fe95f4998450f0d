"""Linear, norm, embedding and MLP blocks as Linen modules; each declares its parameters with logical axis names.

Glossary of shape letters in this package:
B decode rows · T flat tokens of a step · N query rows of an attention call · Q queries in one of them ·
H hidden · F MLP width · V vocabulary · K KV heads · G query heads per KV head · D head_dim · P page-table width ·
S slots.

Linear weights are stored ``[out..., in]`` and contracted over the last axis: XLA:CPU's fast layout, and a memory-order
read on GPU for a few rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from jaxsqueeze.models.config import Activation
from jaxsqueeze.quant.qtensor import QTensor
from pallas_kernels.linear import api as matmul
from pallas_kernels.target import Target

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


def linear(x_TI: jax.Array, weight: jax.Array | QTensor, bits: jax.Array | None, target: Target) -> jax.Array:
    """``x[T, in] @ weight[out..., in]`` -> f32[T, out...]; ``bits``: see ``weight_bits``.

    The weight is viewed as a matrix: XLA would transpose (copy) one with several output axes.
    """
    if isinstance(weight, QTensor):
        return weight.matmul(x_TI, target)
    *out, size = weight.shape
    matrix = weight.reshape(-1, size)
    y = matmul.linear(x_TI, matrix, None if bits is None else bits.reshape(matrix.shape), target=target)
    return y.reshape(x_TI.shape[0], *out)


def weight_bits(module: nn.Module) -> jax.Array | None:
    """The module's 16-bit weight as integers: on CPU the runner passes such a view (runner/views.py)."""
    return module.get_variable("views", "bits") if module.has_variable("views", "bits") else None


def weight_param(module: nn.Module, shape: tuple[int, ...], axes: tuple[str, ...], dtype: jnp.dtype):
    """The module's weight: an array ``[*out, in]``, or the QTensor that was given for one."""
    if module.has_variable("params", "weight") and isinstance(w := module.get_variable("params", "weight"), QTensor):
        return w
    return module.param("weight", nn.with_logical_partitioning(nn.initializers.normal(0.02), axes), shape, dtype)


class Linear(nn.Module):
    """``axes`` name the dimensions of ``shape = (*out, in)`` for sharding. The result is f32: what follows rounds once,
    at its own end."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: jnp.dtype
    target: Target
    use_bias: bool = False

    @nn.compact
    def __call__(self, x_TI: jax.Array) -> jax.Array:
        weight = weight_param(self, self.shape, self.axes, self.dtype)
        y = linear(x_TI, weight, weight_bits(self), self.target)
        if self.use_bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[:-1])
            y = y + self.param("bias", zeros, self.shape[:-1], self.dtype).astype(jnp.float32)
        return y


class RMSNorm(nn.Module):
    """Zhang & Sennrich 2019. ``scale`` is the effective multiplier, f32; statistics in f32."""

    size: int
    eps: float
    dtype: jnp.dtype  # of the result

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.with_logical_partitioning(nn.initializers.ones, ("norm",))
        scale = self.param("scale", init, (self.size,), jnp.float32)
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * scale).astype(self.dtype)


class Embedding(nn.Module):
    """Token table ``[V, H]``; ``unembed`` reuses it as the output head of tied models."""

    vocab_size: int
    hidden_size: int
    dtype: jnp.dtype
    target: Target

    def setup(self) -> None:
        self.weight = weight_param(self, (self.vocab_size, self.hidden_size), ("vocab", "hidden"), self.dtype)

    def __call__(self, tokens_T: jax.Array) -> jax.Array:
        if isinstance(self.weight, QTensor):
            return self.weight.take(tokens_T).astype(self.dtype)
        bits = weight_bits(self)
        if bits is not None:  # looking up bf16 rows, XLA:CPU would convert the whole table to f32 first
            return lax.bitcast_convert_type(jnp.take(bits, tokens_T, axis=0, mode="clip"), self.dtype)
        return jnp.take(self.weight, tokens_T, axis=0, mode="clip")

    def unembed(self, x_TH: jax.Array) -> jax.Array:
        """Logits f32[T, V]."""
        return linear(x_TH, self.weight, weight_bits(self), self.target)


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` (Shazeer 2020); gate and up are one matmul."""

    hidden_size: int
    width: int
    activation: Activation
    dtype: jnp.dtype
    target: Target
    use_bias: bool = False

    @nn.compact
    def __call__(self, x_TH: jax.Array) -> jax.Array:
        shape = (2, self.width, self.hidden_size)
        axes = "gate_up", "mlp", "hidden"
        both = Linear(shape, axes, self.dtype, self.target, self.use_bias, name="gate_up")(x_TH)
        h_TF = (ACTIVATIONS[self.activation](both[:, 0]) * both[:, 1]).astype(self.dtype)
        shape, axes = (self.hidden_size, self.width), ("hidden", "mlp")
        return Linear(shape, axes, self.dtype, self.target, self.use_bias, name="down")(h_TF)
