"""EngineConfig: what the user chose, frozen. ``scripts/serve.py`` flags are made from these fields.

Values that depend on the model or the device (None here) are resolved once by ``Engine`` and reported in the ledger.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

PREFILL_ROW = 32  # queries of one sequence that share a gather of its keys; chunks are charged in whole rows
MAX_SLOTS = 4096  # each holds a few counts for every word of the vocabulary, used or not

DType = Literal["auto", "bfloat16", "float32"]
KV_DTYPES = ("auto", "bf16", "int8", "int4")


def flag(default: object, help: str):
    """A dataclass field that is also a command-line flag of the same name."""
    return dataclasses.field(default=default, metadata={"help": help})


class KVDtypes(NamedTuple):
    """What keys and values are kept in, each one of ``KV_DTYPES``."""

    k: str = "auto"
    v: str = "auto"

    @classmethod
    def parse(cls, text: str) -> KVDtypes:
        """Of ``int8``, or of ``k=int8,v=int4``, where what is left out is auto. Raises ValueError for anything else."""
        parts = dict(part.partition("=")[::2] for part in text.split(",")) if "=" in text else {"k": text, "v": text}
        if not set(parts) <= {"k", "v"} or not set(parts.values()) <= set(KV_DTYPES):
            raise ValueError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, or like k=int8,v=int4, got {text!r}")
        return cls(**parts)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    model: str = flag("demo", "converted folder, or any source that convert takes")
    dtype: DType = flag("auto", "arithmetic and KV type; auto: as converted")
    kv_dtype: str = flag("auto", "what KV is kept in: bf16, int8, int4, or K and V apart, like k=int8,v=int4")
    max_slots: int = flag(32, "requests decoded at once")
    max_model_len: int | None = flag(None, "longest prompt plus output, tokens; default: the model's, at most 4096")
    page_size: int = flag(16, "tokens in one KV page")
    kv_bytes: int | None = flag(
        None,
        "bytes for the KV pool; default: by --memory-fraction; on CPU 1 GiB, or a quarter of the free memory if less",
    )
    memory_fraction: float = flag(0.85, "share of the device memory for weights, KV and activations (GPU)")
    max_step_tokens: int = flag(256, "prefill tokens computed beside the decode rows in one step")
    decode_steps: int = flag(4, "tokens a row may decode before the host looks again, when nobody waits")
    deterministic: bool = flag(False, "one bucket of each kind: a request gives the same bits alone and under load")
    seed: int = flag(0, "seeds requests that name none")

    def __post_init__(self) -> None:
        KVDtypes.parse(self.kv_dtype)
        if not 1 <= self.max_slots <= MAX_SLOTS:
            raise ValueError(f"max_slots must be between 1 and {MAX_SLOTS}, got {self.max_slots}")
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, got {self.seed}")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction must be in (0, 1], got {self.memory_fraction}")
        if self.max_step_tokens < self.page_size or self.max_step_tokens % PREFILL_ROW:
            raise ValueError(
                f"max_step_tokens must be a multiple of {PREFILL_ROW} and >= page_size, got {self.max_step_tokens}"
            )
        if self.decode_steps < 1:
            raise ValueError(f"decode_steps must be >= 1, got {self.decode_steps}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be >= 2, got {self.max_model_len}")
