"""The few static shapes that steps come in. Everything here is compiled before the engine is ready.

Decode rows: about the powers of two up to ``max_slots``. Prefill: N rows of ``PREFILL_ROW`` tokens, a few N. Context
lengths need no buckets: attention loops over as many page blocks as the longest row has.
"""

from __future__ import annotations

import dataclasses

from jaxsqueeze.config import PREFILL_ROW, EngineConfig


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes in ascending order; a step takes the first that fits."""

    decode: tuple[int, ...]  # rows of decode_n
    mixed: tuple[tuple[int, int], ...]  # (decode rows, prefill rows of PREFILL_ROW tokens), cheapest first

    def pick_decode(self, rows: int) -> int:
        return next(size for size in self.decode if size >= rows)

    def pick_mixed(self, rows: int, prefill_rows: int) -> tuple[int, int]:
        return next(b for b in self.mixed if b[0] >= rows and b[1] >= prefill_rows)


def make_buckets(config: EngineConfig, sizes: tuple[int, ...]) -> Buckets:
    """``sizes``: of decode, see ``decode_sizes``."""
    rows = config.max_step_tokens // PREFILL_ROW
    if config.deterministic:
        return Buckets(sizes[-1:], ((sizes[0], rows),))
    small = max(1, rows // 4)
    # Beside many prefill rows, decode rows cost little: one program for any number of them.
    mixed = {(sizes[0], small): None, (sizes[-1], small): None, (sizes[-1], rows): None}
    return Buckets(sizes, tuple(mixed))


def decode_sizes(max_slots: int, platform: str, dtype: str) -> tuple[int, ...]:
    """Powers of two below ``max_slots``, and that; without those that save nothing (measured on XLA:CPU, jaxlib 0.10):
    two rows in bf16, whose matmul takes as long as that of four; one row in f32, whose KV write copies the pool."""
    useless = {"bfloat16": 2, "float32": 1}[dtype] if platform == "cpu" else None
    sizes = [2**i for i in range((max_slots - 1).bit_length()) if 2**i != useless]
    return (*sizes, max(max_slots, 2) if useless == 1 else max_slots)
