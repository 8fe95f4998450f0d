"""The few static shapes that steps come in. Everything here is compiled before the engine is ready.

Decode rows: powers of two up to ``max_slots``. Prefill: N rows of ``PREFILL_ROW`` tokens, a few N. Context lengths need
no buckets: attention loops over as many page blocks as the longest row has.
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


def make_buckets(config: EngineConfig, min_rows: int) -> Buckets:
    """``min_rows``: below it the platform's matmuls get no faster (see ``min_decode_rows``)."""
    top = config.max_slots
    rows = config.max_step_tokens // PREFILL_ROW
    if config.deterministic:
        return Buckets((max(top, min_rows),), ((min_rows, rows),))
    sizes = [min_rows]
    while sizes[-1] < top:
        sizes.append(min(2 * sizes[-1], top))
    small = max(1, rows // 4)
    # Beside many prefill rows, decode rows cost little: one program for any number of them.
    mixed = {(sizes[0], small): None, (sizes[-1], small): None, (sizes[-1], rows): None}
    return Buckets(tuple(sizes), tuple(mixed))


def min_decode_rows(platform: str) -> int:
    """XLA:CPU decodes one row no faster than two: its one-row bf16 matmul takes a path without vector instructions, 10x
    slower (measured on AVX2 and AVX-512 machines, jaxlib 0.10), and its one-row KV write copies a float32 pool."""
    return 2 if platform == "cpu" else 1
