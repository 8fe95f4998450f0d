"""Problems that stand for what serving asks of each op: shapes of Llama-3-8B (32 query heads, 8 KV heads, head_dim 128,
hidden 4096, MLP 14336, vocabulary 128256), other head sizes, every format, few rows (decode) and many (prefill).
"""

from __future__ import annotations

from typing import Any

from pallas_kernels.kv_write.problem import Problem as KVWrite
from pallas_kernels.moe_matmul.problem import Problem as MoEMatmul
from pallas_kernels.paged_attention.problem import Problem as PagedAttention
from pallas_kernels.quant_matmul.problem import Problem as QuantMatmul
from pallas_kernels.sample_topk.problem import Problem as SampleTopK

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


def _paged_attention() -> list[PagedAttention]:
    def problem(N: int, Q: int, k_format: str = "same", v_format: str | None = None, **more: Any) -> PagedAttention:
        fields = {"K": 8, "G": 4, "D": 128, "page_size": PAGE, "P": 512, "dtype": "bfloat16", "scale": 0.125, **more}
        return PagedAttention(N=N, Q=Q, k_format=k_format, v_format=v_format or k_format, **fields)

    return [
        *(problem(N, 1) for N in (1, 8, 64)),
        problem(8, 5),
        problem(8, 32),
        *(problem(N, Q, format) for format in ("int8", "int4") for N, Q in ((8, 1), (8, 32))),
        problem(8, 1, "int8", "int4"),
        *(problem(N, Q, D=D, K=K) for D, K in ((64, 8), (256, 4)) for N, Q in ((8, 1), (8, 32))),
        problem(8, 1, D=80, K=32, G=1),
        problem(8, 1, G=8),
        problem(8, 32, dtype="float16"),
        problem(8, 32, dtype="float32"),
        problem(8, 32, window=4096, softcap=50.0, sinks=True),
    ]


def _quant_matmul() -> list[QuantMatmul]:
    def problem(tokens: int, format: str, group: int, out: int = 28672, width: int = 4096, **more: Any) -> QuantMatmul:
        fields = {"scale_dtype": "float16" if group else "float32", **more}
        return QuantMatmul(tokens, out, width, "bfloat16", format, group, **fields)

    return [
        *(problem(tokens, format, group) for format, group in _COMMON for tokens in (1, 16, 64, 256)),
        *(problem(tokens, format, group, **more) for format, group, more in _OTHER for tokens in (1, 256)),
        *(problem(1, format, group, *shape) for format, group in _COMMON for shape in ((4096, 14336), (128256, 4096))),
    ]


def _moe_matmul() -> list[MoEMatmul]:
    """Mixtral-8x7B's experts, the small ones of models with many, and gpt-oss-20b's."""

    def problem(tokens: int, format: str, group: int, E: int, out: int, width: int, **more: Any) -> MoEMatmul:
        fields = {"scale_dtype": "float16" if group else "float32", **more}
        return MoEMatmul(tokens, out, width, "bfloat16", format, group, E=E, **fields)

    return [
        *(problem(rows, format, group, 8, 28672, 4096) for format, group in _COMMON for rows in (16, 512)),
        *(problem(rows, "int4", 128, 128, 1536, 2048) for rows in (64, 2048)),
        problem(16, "int4", 32, 8, 28672, 4096, zeros=True),
        *(problem(rows, "fp4", 32, 32, 5760, 2880, scale_dtype="bfloat16") for rows in (64, 2048)),
    ]


_COMMON = (("int8", 0), ("int4", 128))  # formats and groups
_OTHER = (
    ("bf16", 0, {}),
    ("fp8", 0, {}),
    ("w8a8", 0, {}),
    ("int4", 128, {"zeros": True}),
    ("int4", 32, {}),
    ("int2", 64, {}),
    # What checkpoints come in: GGUF's Q8_0 and Q4_1, fp8 in blocks of 128, MXFP4.
    ("int8", 32, {}),
    ("int4", 32, {"zeros": True, "scale_dtype": "float32"}),
    ("fp8", 128, {"scale_dtype": "float32"}),
    ("fp4", 32, {"scale_dtype": "bfloat16"}),
)

PROBLEMS: dict[str, list[Any]] = {
    "kv_write": _kv_write(),
    "paged_attention": _paged_attention(),
    "quant_matmul": _quant_matmul(),
    "moe_matmul": _moe_matmul(),
    "sample_topk": [SampleTopK(*shape) for shape in ((1, 128256), (64, 128256), (8, 3000))],
}
