"""Which arrays a converted folder stores for each parameter: one, or those of a QTensor."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.families import rules
from jaxsqueeze.quant import qtensor
from jaxsqueeze.quant.scheme import Scheme


def stored(
    cfg: ModelConfig, path: str, dtype: np.dtype, schemes: Mapping[str, Scheme]
) -> jax.ShapeDtypeStruct | dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types for the parameter at ``path`` in a model of ``dtype``."""
    shape = rules.param_shape(cfg, path)
    if path in schemes:
        return qtensor.abstract(schemes[path], shape).arrays
    return jax.ShapeDtypeStruct(shape, rules.stored_dtype(path, dtype))


def nbytes(cfg: ModelConfig, path: str, dtype: np.dtype, schemes: Mapping[str, Scheme]) -> int:
    arrays = jax.tree.leaves(stored(cfg, path, dtype, schemes))
    return sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in arrays)
