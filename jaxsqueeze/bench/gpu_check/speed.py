"""Part two: what the device can do (a copy, a read, a matmul), then how near each op comes, at shapes of Llama 3 8B.

Bytes and operations are the least that an op must do (kernel_cost.py); XLA's own code for the op is timed beside it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxsqueeze.bench import kernel_inputs, random_arrays, random_model, timing
from jaxsqueeze.bench.gpu_check.case import Case, Figures, Setting
from jaxsqueeze.bench.kernel_cost import Cost, cost
from jaxsqueeze.bench.kernel_inputs import CARRIED, Fill
from pallas_kernels import dispatch
from pallas_kernels.kv_write.problem import Problem as KVWrite
from pallas_kernels.moe_matmul.problem import Problem as MoE
from pallas_kernels.paged_attention.problem import Problem as Attention
from pallas_kernels.quant_matmul.problem import Problem as Matmul
from pallas_kernels.sample_topk.problem import Problem as Filter
from pallas_kernels.target import Target

SECONDS = 0.1  # of measurement, each figure
PAGE = 16
CONTEXT = 8192
GATE_UP = 28672, 4096


@dataclasses.dataclass(frozen=True)
class Timed:
    """``bound``: the ceiling that counts for it."""

    label: str
    op: str
    problem: Any
    bound: str = "bytes"  # or "operations"


def cases(setting: Setting) -> list[Case]:
    """Ceilings, then each op by the implementation that serves and by the others that there are, then by XLA."""
    target, quick = setting.target, setting.quick
    known = dispatch.IMPLEMENTATIONS.get(target.platform, {})
    found = _ceilings(quick, target)
    for timed in _quick() if quick else _llama_8b():
        for name in (*known.get(timed.op, ()), dispatch.REFERENCE):
            found.append(_case(timed, name, setting))
    return found


def _ceilings(quick: bool, target: Target) -> list[Case]:
    n = 2**16 if quick else 2**28
    side = 64 if quick else 8192
    words = jax.ShapeDtypeStruct((n,), jnp.uint32)
    square = jax.ShapeDtypeStruct((side, side), jnp.bfloat16)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.dot(a, b, preferred_element_type=jnp.bfloat16)

    return [
        _ceiling("copy", lambda x: x + 1, (words,), Cost(8 * n), target),
        _ceiling("read", lambda x: jnp.max(x), (words,), Cost(4 * n), target),
        _ceiling("matmul", product, (square, square), Cost(6 * side**2, 2 * side**3), target),
    ]


def _ceiling(name: str, call: Any, shapes: timing.Args, least: Cost, target: Target) -> Case:
    def run(loop: timing.Loop) -> Figures:
        sets = [tuple(random_arrays.values(i, s.shape, s.dtype) for s in shapes) for i in range(2)]
        timed = timing.Run(loop, sets).time(seconds=3 * SECONDS)
        return {"ceiling": name, **_figures(timed, least)}

    def prepare() -> timing.Loop:
        return timing.build(call, shapes, 2, floor_us=least.floor_us(target))

    return Case(f"ceiling {name}", prepare, run)


def _case(timed: Timed, name: str, setting: Setting) -> Case:
    target = setting.target
    op, problem, carried = timed.op, timed.problem, CARRIED.get(timed.op, 0)
    least = cost(op, problem, Fill(0))

    def prepare() -> tuple[timing.Loop, int, Any]:
        choice = dispatch.choose(op, problem, target, False)
        tile = choice.tile if choice.implementation == name else dispatch.tiles(op, name, problem, target)[0]
        call = functools.partial(dispatch.call, op, name, problem, tile, target)
        args = kernel_inputs.shapes(op, problem, Fill(0))
        copies = 2 if setting.quick else timing.copies_needed(args)
        loop = timing.build(call, args, copies, carried=carried, floor_us=least.floor_us(target))
        return loop, copies, {"tile": dict(tile), "chosen": choice.implementation == name}

    def run(prepared: tuple[timing.Loop, int, Any]) -> Figures:
        loop, copies, how = prepared
        sets = [kernel_inputs.make(op, problem, Fill(seed)) for seed in range(copies)]
        figures = _figures(timing.Run(loop, sets).time(seconds=SECONDS), least)
        return {"label": timed.label, "op": op, "implementation": name, "bound": timed.bound, **how, **figures}

    return Case(f"{timed.label}: {name}", prepare, run)


def _figures(timed: timing.Timing, least: Cost) -> Figures:
    return {
        "us": timed.us,
        "spread": timed.spread,
        "gb_per_s": least.bytes / timed.us / 1e3,
        "tflop_per_s": least.operations / timed.us / 1e6,
    }


def _attention(N: int, Q: int, format: str, context: int = CONTEXT) -> Attention:
    return Attention(N, Q, 8, 4, 128, PAGE, context // PAGE, "bfloat16", format, format, 128**-0.5)


def _matmul(T: int, format: str, out: int, width: int) -> Matmul:
    return Matmul(T, out, width, "bfloat16", format, **_grouped(format))


def _moe(T: int, format: str, E: int, out: int, width: int) -> MoE:
    return MoE(T, out, width, "bfloat16", format, E=E, **_grouped(format))


def _grouped(format: str) -> dict[str, Any]:
    group = random_model.SCHEMES[format].group if format in random_model.SCHEMES else 0
    return {"group": group, "scale_dtype": "float16" if group else "float32"}


def _llama_8b() -> list[Timed]:
    """What counts most comes first: time may run out."""
    kv = {"bf16": "same", "int8": "int8", "int4": "int4"}
    timed = [
        Timed(f"attention {rows} x 8k {name}", "paged_attention", _attention(rows, 1, format))
        for name, format in kv.items()
        for rows in (1, 8, 64)
    ]
    timed += _gate_up(1) + _gate_up(16)
    timed += [
        Timed(f"{name} {f} T=1", "quant_matmul", _matmul(1, f, *shape))
        for name, shape in (("down", (4096, 14336)), ("qkv", (6144, 4096)), ("o", (4096, 4096)))
        for f in ("int8", "int4")
    ]
    timed += [
        Timed("filter 1 x 128k", "sample_topk", Filter(1, 128256)),
        Timed("filter 64 x 128k", "sample_topk", Filter(64, 128256)),
        Timed("prefill 8 x 32 at 8k bf16", "paged_attention", _attention(8, 32, "same"), "operations"),
        Timed("kv_write 64 bf16", "kv_write", KVWrite(64, 8, 128, PAGE, "bfloat16", "same")),
        Timed("kv_write 64 int8", "kv_write", KVWrite(64, 8, 128, PAGE, "bfloat16", "int8")),
    ]
    timed += [  # Mixtral 8x7B's experts and, of int4, the many small ones of Qwen3 30B
        Timed(f"experts {E} {f} T={T}", "moe_matmul", _moe(T, f, E, *shape), "bytes" if T <= 64 else "operations")
        for f, T, E, shape in (
            *((f, T, 8, GATE_UP) for f in ("int8", "int4") for T in (2, 32, 512)),
            *(("int4", T, 128, (1536, 2048)) for T in (8, 64, 2048)),
        )
    ]
    return timed + _gate_up(8) + _gate_up(64) + _gate_up(512)


def _gate_up(T: int) -> list[Timed]:
    bound = "bytes" if T <= 64 else "operations"
    formats = ("int8", "int4", "fp8", "w8a8", "bf16", "int2")
    return [Timed(f"gate_up {f} T={T}", "quant_matmul", _matmul(T, f, *GATE_UP), bound) for f in formats]


def _quick() -> list[Timed]:
    return [
        Timed("attention 2 x 64", "paged_attention", Attention(2, 1, 2, 2, 16, 4, 16, "float32", "bits", "bits", 0.25)),
        Timed("matmul int8 T=4", "quant_matmul", Matmul(4, 64, 64, "float32", "int8"), "operations"),
        Timed("experts 3 T=4", "moe_matmul", MoE(4, 64, 64, "float32", "int8", E=3)),
        Timed("filter 2 x 512", "sample_topk", Filter(2, 512)),
        Timed("kv_write 4", "kv_write", KVWrite(4, 2, 16, 4, "float32", "bits")),
    ]
