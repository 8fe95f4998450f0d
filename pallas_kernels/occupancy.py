"""How many blocks of a kernel a streaming multiprocessor (SM) holds at once, from what one block takes.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; how registers and shared memory
are handed out: the CUDA Occupancy Calculator.
"""

from __future__ import annotations

import dataclasses

_REGISTERS = 65536  # 32-bit registers of an SM, and the most that a block may have
_PARTITIONS = 4  # of an SM; each has a quarter of the registers
_REGISTER_UNIT = 256  # registers of a warp are handed out in multiples of this
_SHARED_UNIT = 128  # bytes; the same for shared memory of a block
_SYSTEM_SHARED = 1024  # bytes of shared memory that the system takes for each block


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one SM holds."""

    warps: int
    blocks: int
    shared: int  # bytes


_LIMITS = {
    80: Limits(64, 32, 164 * 1024),
    86: Limits(48, 16, 100 * 1024),
    89: Limits(48, 24, 100 * 1024),
    90: Limits(64, 32, 228 * 1024),
    100: Limits(64, 32, 228 * 1024),
}


def blocks_per_sm(capability: int, warps: int, registers: int, shared: int) -> int:
    """Blocks of ``warps`` warps at once on one SM; 0: the kernel cannot be launched.

    ``registers`` of a thread; ``shared`` bytes of a block. Raises ValueError for an unknown capability.
    """
    if capability not in _LIMITS:
        raise ValueError(f"no limits known of compute capability {capability}: known are {sorted(_LIMITS)}")
    limits = _LIMITS[capability]
    of_warp = _up(registers * 32, _REGISTER_UNIT)
    if of_warp * _up(warps, _PARTITIONS) > _REGISTERS:
        return 0
    by_registers = _REGISTERS // _PARTITIONS // of_warp * _PARTITIONS // warps
    by_shared = limits.shared // _up(shared + _SYSTEM_SHARED, _SHARED_UNIT)
    return min(limits.warps // warps, limits.blocks, by_registers, by_shared)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
