"""Parameters of Mosaic GPU's simulator: kernels run on a CPU with shared memory, barriers and asynchronous copies.

Memory starts as NaN. From jax 0.11 on, the simulator also raises where two accesses race.
"""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.experimental.pallas.tpu as pltpu


def parameters() -> Any:
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams(detect_races=True)
    # jax 0.10 has the class and no public name for it; the parameters for TPUs share its base.
    siblings = pltpu.InterpretParams.__mro__[1].__subclasses__()
    return next(cls for cls in siblings if cls.__name__ == "InterpretGPUParams")()
