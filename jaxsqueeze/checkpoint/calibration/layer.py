"""One decoder layer's weights quantised for the inputs that a text gave them: AWQ's scales, then a clipped grid, then
GPTQ's codes on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxsqueeze.checkpoint.calibration.fold import MAKERS, fold, shared
from jaxsqueeze.checkpoint.calibration.forward import Statistics
from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.quant.awq import FORMATS, input_scales
from jaxsqueeze.quant.clip import clip
from jaxsqueeze.quant.gptq import compensation, gptq
from jaxsqueeze.quant.qtensor import QTensor
from jaxsqueeze.quant.rotation import rotate
from jaxsqueeze.quant.scheme import Scheme


def quantise(
    cfg: ModelConfig,
    params: dict[str, jax.Array],
    seen: dict[str, Statistics],
    schemes: Mapping[str, Scheme],
    tick: Callable[[], None],
) -> dict[str, jax.Array | QTensor]:
    """The layer's parameters, f32 by path without the layer's name, with QTensors for those in ``schemes``. The others
    stay what they are, but for scales that are folded into norms and biases. ``tick`` is called after each weight."""
    names = [path.removesuffix("/weight") for path in schemes]
    rotated = {path.removesuffix("/weight") for path, scheme in schemes.items() if scheme.rotated}
    by = {name: compensation(_rotated(seen[name].moments) if name in rotated else seen[name].moments) for name in names}
    scales = {}
    for name in names:
        scheme, maker = schemes[f"{name}/weight"], MAKERS.get(name)
        # A weight that is kept is left alone: one rounded to bf16 anew would not be what it was.
        movable = maker is not None and (maker.endswith("norm") or maker in names)
        if movable and name not in rotated and scheme.format in FORMATS:
            magnitude = shared(cfg, name, seen[name].magnitude)
            scales[name] = input_scales(_matrix(params[f"{name}/weight"]), by[name].cost, magnitude, scheme)
    for name, s in scales.items():
        params, by[name] = fold(cfg, params, name, s), by[name].scaled(s)
    for path, scheme in schemes.items():
        weight, own = _matrix(params[path]), by.pop(path.removesuffix("/weight"))
        if scheme.rotated:
            weight = rotate(weight)
        arrays = gptq(weight, own, clip(weight, own.cost, scheme), scheme)
        found = QTensor(*arrays, scheme.format, params[path].shape, rotated=scheme.rotated)
        params[path] = jax.block_until_ready(found)
        tick()
    return params


@jax.jit
def _rotated(moments: jax.Array) -> jax.Array:
    """Second moments of rotated inputs."""
    return rotate(rotate(moments).T)


def _matrix(weight: jax.Array) -> jax.Array:
    return jnp.reshape(weight, (-1, weight.shape[-1]))
