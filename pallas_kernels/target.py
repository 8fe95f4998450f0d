"""What a program is compiled for, as static facts. Kernels, tiles and the choice between them depend on this and on
shapes, never on the machine that compiles: so the program for an H200 can be built and read on a machine without one.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

# Shared memory that one block may use, KiB, by compute capability (CUDA C++ Programming Guide, technical
# specifications): what the device has less the 1 KiB that the system keeps.
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}


@dataclasses.dataclass(frozen=True)
class Target:
    """``cores``: streaming multiprocessors. The fields after ``kind`` are zero on CPU."""

    platform: Literal["cpu", "cuda"]
    kind: str  # as jax names the device: which table of tuned tiles applies
    capability: int = 0  # 90 for compute capability 9.0
    cores: int = 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory one block may use; of an unknown capability, what the smallest known one has."""
        return 1024 * _SHARED_KIB.get(self.capability, min(_SHARED_KIB.values()))

    @classmethod
    def of(cls, device: jax.Device) -> Target:
        """Raises ValueError for a platform that nothing here was written for."""
        if device.platform == "cpu":
            return CPU
        if device.platform not in ("gpu", "cuda"):
            raise ValueError(f"no kernels for platform {device.platform!r}: run on CPU or on an NVIDIA GPU")
        major, minor = str(device.compute_capability).split(".")
        return cls("cuda", device.device_kind, int(major) * 10 + int(minor), device.core_count)


CPU = Target("cpu", "cpu")
A100 = Target("cuda", "NVIDIA A100-SXM4-80GB", 80, 108)
H200 = Target("cuda", "NVIDIA H200", 90, 132)
