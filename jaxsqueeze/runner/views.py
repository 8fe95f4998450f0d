"""Second views of parameter memory, where XLA:CPU handles a type badly. No bytes are added."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jaxsqueeze.models.decoder import Params, Variables


def with_views(params: Params) -> Variables:
    """The decoder's variables. On CPU every bf16 ``weight`` also appears as unsigned integers, ``bits``, in the
    collection "views", sharing its memory: XLA:CPU looks up and multiplies single bf16 rows badly (models/layers.py,
    pallas_kernels/linear)."""

    def viewed(name: str, x: object) -> bool:
        plain = name == "weight" and isinstance(x, jax.Array) and x.dtype == jnp.bfloat16
        return plain and next(iter(x.devices())).platform == "cpu"

    def bits(weight: jax.Array) -> jax.Array:
        return jax.device_put(np.asarray(weight).view(np.uint16), weight.sharding, may_alias=True)

    views = {
        (*path, "bits"): bits(x) for (*path, name), x in traverse_util.flatten_dict(params).items() if viewed(name, x)
    }
    return {"params": params, "views": traverse_util.unflatten_dict(views)}
