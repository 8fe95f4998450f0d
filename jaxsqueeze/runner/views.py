"""Second views of parameter memory, where XLA:CPU handles a type badly. No bytes are added."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsqueeze.models.decoder import Params, Variables


def with_views(params: Params) -> Variables:
    """The decoder's variables. On CPU a 16-bit embedding table also appears as integers, sharing its memory."""
    table = params["embed"]["weight"]
    views: dict[str, Any] = {}
    if next(iter(table.devices())).platform == "cpu" and table.dtype == jnp.bfloat16:
        bits = np.asarray(table).view(np.uint16)
        views = {"embed": {"bits": jax.device_put(bits, table.sharding, may_alias=True)}}
    return {"params": params, "views": views}
