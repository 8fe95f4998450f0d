"""Models of well-known shapes with random weights, made on the device: speed needs no trained ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util

from jaxsqueeze.bench import random_arrays
from jaxsqueeze.models.config import LayerConfig, ModelConfig, RopeConfig
from jaxsqueeze.models.decoder import Params, abstract_params
from jaxsqueeze.quant import qtensor
from jaxsqueeze.quant.qtensor import QTensor
from jaxsqueeze.quant.scheme import Scheme
from pallas_kernels.quant_matmul.problem import Format

STD = 0.02  # of weights
SCHEMES = {
    "int4": Scheme("int4", 128, scale_dtype="float16"),
    "fp4": Scheme("fp4", 32, scale_dtype="bfloat16"),
    "int2": Scheme("int2", 64, scale_dtype="float16"),
}
CODES_STD = {"fp8": 1.0, "fp4": 2.93, "int4": 16 / 12**0.5, "int2": 4 / 12**0.5}  # fp8's are normal, others uniform


def _llama(layers: int, hidden: int, width: int, heads: int, head_dim: int, kv_heads: int, **rest: Any) -> ModelConfig:
    return ModelConfig(
        **{
            "family": "llama",
            "vocab_size": 128256,
            "hidden_size": hidden,
            "intermediate_size": width,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "layers": (LayerConfig(),) * layers,
            "ropes": (RopeConfig(500_000.0, head_dim),),
            "max_position": 8192,
            "norm_eps": 1e-5,
            "attn_scale": head_dim**-0.5,
            **rest,
        }
    )


# The configs that Meta publishes with Llama 3.2 1B and Llama 3 8B; "tiny" is for tests.
SHAPES = {
    "llama-1b": _llama(16, 2048, 8192, 32, 64, 8, tie_embeddings=True),
    "llama-8b": _llama(32, 4096, 14336, 32, 128, 8),
    "tiny": _llama(1, 64, 128, 4, 16, 2, vocab_size=256),
}


def abstract(cfg: ModelConfig, dtype: jnp.dtype, format: Format | None) -> Params:
    """The parameters' shapes; with ``format``, matmul weights are QTensors (embeddings are looked up: they are not)."""

    def quantised(path: tuple[str, ...], x: Any) -> Any:
        if format is None or path[-1] != "weight" or path[0] == "embed":
            return x
        return qtensor.abstract(SCHEMES.get(format, Scheme(format)), x.shape)

    flat = traverse_util.flatten_dict(nn.unbox(abstract_params(cfg, dtype)))
    return traverse_util.unflatten_dict({path: quantised(path, x) for path, x in flat.items()})


def make(cfg: ModelConfig, dtype: jnp.dtype, format: Format | None) -> Params:
    """Random parameters of a trained model's size, so that activations stay finite."""
    flat = traverse_util.flatten_dict(abstract(cfg, dtype, format))
    return traverse_util.unflatten_dict({path: _random(i, path[-1], x) for i, (path, x) in enumerate(flat.items())})


def _random(seed: int, name: str, x: Any) -> Any:
    if isinstance(x, QTensor):
        scales = jnp.full(x.scales.shape, STD / CODES_STD.get(x.format, 256 / 12**0.5), x.scales.dtype)
        return x.replace(codes=random_arrays.values(seed, x.codes.shape, x.codes.dtype), scales=scales)
    if name == "weight":
        return random_arrays.values(seed, x.shape, x.dtype, STD)
    return jnp.full(x.shape, name == "scale", x.dtype)


def step_bytes(params: Params) -> int:
    """Weights that one decode step reads: all but an embedding table that is only looked up."""
    looked_up = params["embed"]["weight"].nbytes if "lm_head" in params else 0
    return sum(x.nbytes for x in jax.tree.leaves(params)) - looked_up
