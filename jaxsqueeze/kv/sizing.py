"""How many pages each cache group gets out of a number of bytes."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import jax

from jaxsqueeze.config import EngineConfig
from jaxsqueeze.kv.pool import Storage, kv_bytes_per_page
from jaxsqueeze.models.config import ModelConfig

CPU_KV_BYTES = 2**30  # default on CPU, unless a quarter of the free memory is less
_CPU_STEP = 2**26  # in steps: programs compiled for one pool size are of no use to the next start with another
MEMINFO = Path("/proc/meminfo")


@dataclasses.dataclass(frozen=True)
class PoolSize:
    """Per cache group: pages (page 0 included) and bytes of one page."""

    num_pages: tuple[int, ...]
    page_bytes: tuple[int, ...]
    full_requests: int  # requests of max_model_len that fit at once


def size_pool(
    cfg: ModelConfig, table_widths: tuple[int, ...], page_size: int, storage: Storage, kv_bytes: int
) -> PoolSize:
    """Pages in the proportion in which one request of max_model_len needs them (``table_widths`` pages per group).

    Raises ValueError if not even one such request fits, with the bytes it takes.
    """
    groups = cfg.cache_groups()
    page_bytes = tuple(kv_bytes_per_page(cfg, len(g.layers), page_size, storage) for g in groups)
    reserved = sum(page_bytes)  # page 0 of each group
    one = sum(w * b for w, b in zip(table_widths, page_bytes, strict=True))
    requests = (kv_bytes - reserved) / one
    if requests < 1:
        raise ValueError(
            f"one request of max_model_len takes {one + reserved} bytes of KV but {kv_bytes} are to be had; "
            "lower --max-model-len or raise --kv-bytes"
        )
    pages = tuple(1 + int(requests * w) for w in table_widths)
    return PoolSize(pages, page_bytes, int(requests))


def default_kv_bytes(config: EngineConfig, step_bytes: int) -> int:
    """Device memory left for KV after what is allocated now (weights) and ``step_bytes`` of step buffers."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is None:
        return min(CPU_KV_BYTES, _free_host_bytes() // 4 // _CPU_STEP * _CPU_STEP)
    return int(stats["bytes_limit"] * config.memory_fraction) - stats["bytes_in_use"] - step_bytes


def _free_host_bytes() -> int:
    """What Linux says is free; where it cannot be told, enough for the default."""
    with contextlib.suppress(OSError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 * CPU_KV_BYTES
