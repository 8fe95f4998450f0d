"""Problems that stand for what serving asks of each op: shapes of Llama-3-8B (32 query heads, 8 KV heads, head_dim 128,
hidden 4096, MLP 14336, vocabulary 128256), other head sizes, every format, few rows (decode) and many (prefill).
"""

from __future__ import annotations

from typing import Any

from pallas_kernels.kv_write.problem import Problem as KVWrite

PAGE = 16


def _kv_write() -> list[KVWrite]:
    def problem(tokens: int, format: str, head_dim: int = 128, heads: int = 8) -> KVWrite:
        return KVWrite(tokens, heads, head_dim, PAGE, "bfloat16", format)

    return [
        *(problem(tokens, format) for format in ("same", "int8", "int4") for tokens in (8, 256)),
        *(problem(8, format, head_dim) for format in ("same", "int8", "int4") for head_dim in (64, 256)),
        problem(8, "same", heads=1),
        problem(8, "same", head_dim=80),
    ]


PROBLEMS: dict[str, list[Any]] = {"kv_write": _kv_write()}
