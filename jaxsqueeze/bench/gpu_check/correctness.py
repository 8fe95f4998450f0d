"""Part one: each op by each implementation, at its default tile and on fresh random inputs, against plain JAX in
float32 on the CPU.

Sizes are small and odd: page borders, one token, few and many rows, shared heads, every format. Pages that were never
written hold NaN, and so does the memory that results are given.
"""

from __future__ import annotations

import functools
import secrets
from typing import Any

import jax
import jax.numpy as jnp

from jaxsqueeze.bench import kernel_check, kernel_inputs
from jaxsqueeze.bench.gpu_check.case import Case, Figures, Setting
from jaxsqueeze.bench.kernel_inputs import Fill
from pallas_kernels import dispatch
from pallas_kernels.kv_write.problem import Problem as KVWrite
from pallas_kernels.moe_matmul.problem import Problem as MoE
from pallas_kernels.paged_attention.problem import Problem as Attention
from pallas_kernels.quant_matmul.problem import Problem as Matmul
from pallas_kernels.sample_topk.problem import Problem as Filter
from pallas_kernels.target import Target

PAGES = 24  # of a pool that is written
POISON_BYTES = 2**26
WEIGHTS = (
    *(("bf16",), ("int8",), ("fp8",), ("w8a8",), ("int4", 128), ("int4", 32, True), ("int2", 64)),
    *(("int8", 32), ("int8", 64, True), ("fp8", 128), ("fp4", 32)),
)


def _kv_write() -> list[Any]:
    formats = ("same", "int8", "int4")
    return [
        *(KVWrite(T, 8, 128, 16, "bfloat16", format) for format in formats for T in (1, 67)),
        *(KVWrite(5, 3, D, 4, "float32", format) for format in formats for D in (64, 80)),
    ]


def _attention() -> list[Any]:
    def problem(N, Q, K, G, D, P, dtype="bfloat16", k="same", v="same", page=16, **rest):
        return Attention(N, Q, K, G, D, page, P, dtype, k, v, D**-0.5, **rest)

    return [
        problem(1, 1, 8, 4, 128, 65),
        problem(5, 1, 8, 4, 128, 33),
        problem(3, 1, 2, 3, 64, 7, "float32"),
        problem(3, 1, 1, 8, 96, 9, "float16"),
        problem(2, 1, 2, 1, 80, 5, page=8),
        problem(2, 1, 2, 2, 256, 17),
        problem(3, 32, 8, 4, 128, 12),
        problem(2, 7, 2, 3, 64, 5, "float32"),
        problem(3, 1, 8, 4, 128, 21, window=100, softcap=30.0),
        problem(2, 32, 2, 4, 128, 9, window=24, sinks=True),
        *(problem(3, Q, 8, 4, 128, 19, k=f, v=f) for f in ("int8", "int4") for Q in (1, 32)),
        problem(2, 1, 2, 4, 64, 9, k="int8", v="int4"),
    ]


def _matmul() -> list[Any]:
    sizes = [(1, 640, 1024), (5, 320, 512), (16, 512, 4096), (67, 384, 1024), (256, 512, 512), (3, 200, 576)]
    return [
        Matmul(T, out, width, "bfloat16", *kind, scale_dtype="float16" if len(kind) > 1 else "float32")
        for kind in WEIGHTS
        for T, out, width in sizes
    ]


def _moe() -> list[Any]:
    sizes = [(2, 256, 512, 8), (40, 384, 512, 6), (300, 256, 1024, 4)]
    return [
        MoE(T, out, width, "bfloat16", *kind, scale_dtype="float16" if len(kind) > 1 else "float32", E=E)
        for kind in WEIGHTS
        for T, out, width, E in sizes
    ]


def _filter() -> list[Any]:
    return [Filter(1, 128256), Filter(7, 1000), Filter(64, 32003)]


PROBLEMS = {
    "paged_attention": _attention,
    "quant_matmul": _matmul,
    "moe_matmul": _moe,
    "kv_write": _kv_write,
    "sample_topk": _filter,
}
QUICK = {
    "paged_attention": [Attention(3, 2, 2, 2, 16, 4, 5, "bfloat16", "int8", "int4", 0.25, window=7, sinks=True)],
    "quant_matmul": [Matmul(3, 16, 64, "bfloat16", "int4", 32, True)],
    "moe_matmul": [MoE(9, 16, 64, "bfloat16", "int8", E=3)],
    "kv_write": [KVWrite(5, 2, 16, 4, "float32", "int4")],
    "sample_topk": [Filter(6, 300)],
}


def cases(setting: Setting) -> list[Case]:
    """The kernels that are tried first come first, and plain JAX, which serves where no kernel does, last."""
    known = dispatch.IMPLEMENTATIONS.get(setting.target.platform, {})
    pairs = [(place, op, name) for op in PROBLEMS for place, name in enumerate(known.get(op, ()))]
    pairs = [*sorted(pairs, key=lambda pair: pair[0]), *((0, op, dispatch.REFERENCE) for op in PROBLEMS)]
    return [
        _case(op, name, problem, setting.target)
        for _, op, name in pairs
        for problem in (QUICK[op] if setting.quick else PROBLEMS[op]())
    ]


def _case(op: str, name: str, problem: Any, target: Target) -> Case:
    fill = Fill(secrets.randbits(31), ragged=True, poison=True, pages=PAGES)

    def prepare() -> Any:
        tile = dispatch.tiles(op, name, problem, target)[0]
        call = functools.partial(dispatch.call, op, name, problem, tile, target)
        args = kernel_inputs.make(op, problem, fill)
        return jax.jit(call).lower(*args).compile(), args, kernel_check.expected(op, problem, args)

    def run(prepared: Any) -> Figures:
        program, args, want = prepared
        _poison()
        got = jax.block_until_ready(program(*args))
        verdict = kernel_check.compare(op, problem, got, want)
        if not verdict.right:
            raise AssertionError(f"{verdict} (seed {fill.seed})")
        return {"op": op, "implementation": name, "error": verdict.error, "limit": verdict.limit}

    return Case(f"{op} {name}: {problem.key}", prepare, run)


def _poison() -> None:
    """Fills free device memory with NaN, where results will most likely be put."""
    blocks = [jnp.full(size // 4, jnp.nan, jnp.float32) for size in (POISON_BYTES, *[POISON_BYTES // 64] * 16)]
    jax.block_until_ready(blocks)
