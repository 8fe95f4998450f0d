"""INT4 matmul of few tokens for Hopper, in Pallas Mosaic GPU: split-K, one warpgroup for ``rows`` outputs and a split.

Outputs are the M side of the tensor core's tile, tokens (padded to a multiple of 8) its N side. Codes never exist as
wide values in memory: they come as bytes by asynchronous copies, are read as 32-bit words, and each of a word's eight
nibbles becomes the last bits of a float of which they count ones, 128 in bfloat16 and 1024 in float16, in the registers
that the multiplication takes them from. So nibble i of all words is one operand, and x is laid out to match, once:

    word w of a row holds inputs 4w + b in nibble 2b and inputs half + 4w + b in nibble 2b + 1, b = 0 .. 3
    x_s[i, t, w] = x[t, (i % 2) * half + 4w + i // 2]        half = padded / 2

A step is ``groups`` times ``group`` bytes of each row: that many groups of the low half of the inputs and of the high
one. Each group's product is scaled in f32, ``stages`` steps are in flight. Splits are summed in f32 by plain JAX.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.launch import Launcher
from pallas_kernels.quant_matmul.problem import Problem
from pallas_kernels.target import Target
from pallas_kernels.tuning import Tile
from pallas_kernels.warpgroup import COMPILER_PARAMS, Transposed, Warpgroup, swizzled

_TOKENS = 64  # more belong on the M side
_NARROW, _UNROLLED = 32, 64 * 256  # tokens of the tall tile, bytes of a step: more of either would spill registers
_ONES = {"bfloat16": (0x4300, 128), "float16": (0x6400, 1024)}  # a float whose last bits count ones: bits and value


def tiles(problem: Problem, target: Target) -> tuple[Tile, ...]:
    """``rows`` of outputs, ``groups`` a step in each half of the inputs, ``stages`` of steps, ``splits`` of them."""
    p = problem
    if target.capability != 90:
        raise NotImplementedError("written for compute capability 9.0 (wgmma)")
    if p.format != "int4" or p.dtype not in _ONES:
        raise NotImplementedError("multiplies int4 weights by bfloat16 or float16")
    if p.group not in (64, 128):
        raise NotImplementedError("groups of 64 or 128: a quarter of one, what a product takes, is at least 16")
    if not 0 < p.T <= _TOKENS:
        raise NotImplementedError(f"1 to {_TOKENS} tokens, not {p.T}")
    if p.out == 0 or p.out % 64:
        raise NotImplementedError("a multiple of 64 outputs")
    if p.width == 0:
        raise NotImplementedError("no inputs")
    steps = p.padded // (2 * p.group)
    found = []
    for rows in (64, 128) if _tokens(p) <= _NARROW else (64,):
        for groups in (2, 4, 1):
            if p.out % rows or steps % groups or rows * groups * p.group > _UNROLLED:
                continue
            splits = max(1, min(2 * target.cores // (p.out // rows), steps // groups // 2, 16))
            for stages in (4, 3, 2):
                shared = _shared_bytes(p, rows, groups, stages)
                if shared <= target.shared_bytes:
                    tile = {"rows": rows, "groups": groups, "stages": stages, "splits": splits}
                    found.append((2 * shared > target.shared_bytes, tile))
    return tuple(tile for _, tile in sorted(found, key=lambda pair: pair[0]))  # first what fits a core twice


def _tokens(p: Problem) -> int:
    return pl.cdiv(p.T, 8) * 8


def _shared_bytes(p: Problem, rows: int, groups: int, stages: int) -> int:
    tokens = _tokens(p)
    step = groups * (rows * p.group + 4 * p.group * tokens + 16 * rows + 8 * tokens)
    return stages * step + 4 * rows * tokens + 4096  # what barriers and alignment take


def run(
    problem: Problem,
    tile: Tile,
    launcher: Launcher | None,
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    *,
    interpret: Any = None,
) -> jax.Array:
    """See ``api.quant_matmul``. ``interpret``: parameters of Mosaic GPU's simulator, None on a GPU."""
    del launcher
    p, tokens, steps = problem, _tokens(problem), problem.padded // (2 * problem.group)
    x = jnp.pad(x, ((0, tokens - p.T), (0, p.padded - p.width))).reshape(tokens, 2, steps, p.group // 4, 4)
    x_s = x.transpose(2, 4, 1, 0, 3).reshape(steps, 8 * tokens, p.group // 4)
    words = lax.bitcast_convert_type(codes.reshape(p.out, -1, 4), jnp.int32)
    arrays = [x_s, words, scales.reshape(2, steps, p.out)]
    if zeros is not None:
        sums = jnp.sum(x.astype(jnp.float32), axis=(3, 4))  # of each group: [tokens, 2, steps]
        arrays += [zeros.reshape(2, steps, p.out), sums.transpose(1, 2, 0)]
    return jnp.sum(_multiply(problem, tile, interpret)(*arrays), axis=0)[: p.T]


def _multiply(problem: Problem, tile: Tile, interpret: Any) -> Any:
    p, tokens = problem, _tokens(problem)
    rows, groups, stages, splits = (tile[name] for name in ("rows", "groups", "stages", "splits"))
    columns = p.group // 4  # words of a row in a group
    steps = p.padded // (2 * p.group * groups)
    share = pl.cdiv(steps, splits)
    shape, dtype = (rows, tokens), jnp.dtype(p.dtype)
    bits, one = _ONES[p.dtype]
    bias = one if p.zeros else one + 8
    warpgroup = Warpgroup(interpret)

    def kernel(*refs: Any) -> None:
        inputs, out, buffers, out_s, loaded = refs[:arity], refs[arity], refs[arity + 1 : -2], refs[-2], refs[-1]
        x_s, words_s, scales_s, *rest_s = buffers
        row, split = lax.axis_index("rows"), lax.axis_index("split")
        here = pl.ds(row * rows, rows)
        start = split * share
        count = jnp.clip(steps - start, 0, share)

        def fetch(i: jax.Array) -> None:
            """Step ``i`` of this split."""
            slot = lax.rem(i, stages)
            first = (start + i) * groups
            span = pl.ds(first, groups)
            x, words, scales, *rest = inputs
            sources = [x.at[span], *(words.at[here, pl.ds((first + j) * columns, columns)] for j in range(groups))]
            sources += [source.at[:, span, here] for source in (scales, *rest[:1])]
            sources += [sums.at[:, span] for sums in rest[1:]]
            targets = [x_s.at[slot], *(words_s.at[slot, j] for j in range(groups))]
            targets += [buffer.at[slot] for buffer in (scales_s, *rest_s)]
            for source, target in zip(sources, targets, strict=True):
                plgpu.copy_gmem_to_smem(source, target, loaded.at[slot])

        for i in range(stages):
            pl.when(i < count)(lambda i=i: fetch(jnp.int32(i)))

        def product(words: jax.Array, slot: jax.Array, j: int, half: int) -> jax.Array:
            """f32[rows, tokens] of one group."""
            pairs = []
            for nibble in range(half, 8, 2):
                code = lax.shift_right_logical(words, jnp.int32(4 * nibble)) & 15 | bits
                a = lax.bitcast_convert_type(code.astype(jnp.int16), dtype) - jnp.array(bias, dtype)
                pairs.append((a, Transposed(x_s.at[slot, j, pl.ds(nibble * tokens, tokens)])))
            result = warpgroup.dot(*pairs)
            if p.zeros:
                zero, total = rest_s[0][slot, half, j].astype(jnp.float32), rest_s[1][slot, half, j]
                result -= lax.broadcast_in_dim(zero, shape, (0,)) * lax.broadcast_in_dim(total, shape, (1,))
            scale = scales_s[slot, half, j].astype(jnp.float32)
            return result * lax.broadcast_in_dim(scale, shape, (0,))

        def step(i: jax.Array, acc: jax.Array) -> jax.Array:
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(loaded.at[slot])
            for j in range(groups):
                words = words_s[slot, j]
                for half in range(2):
                    acc += product(words, slot, j, half)
            plgpu.commit_smem()  # all warps have read this step
            pl.when(i + stages < count)(lambda: fetch(i + stages))
            return acc

        acc = warpgroup.laid_out(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        warpgroup.store_transposed(out_s, lax.fori_loop(0, count, step, acc))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, out.at[split, :, here])
        plgpu.wait_smem_to_gmem(0)

    buffers = [
        plgpu.SMEM((stages, groups, 8 * tokens, columns), dtype, transforms=swizzled(columns, dtype)),
        plgpu.SMEM((stages, groups, rows, columns), jnp.int32, transforms=swizzled(columns, jnp.int32)),
        plgpu.SMEM((stages, 2, groups, rows), p.scale_dtype),
    ]
    if p.zeros:
        buffers.append(plgpu.SMEM((stages, 2, groups, rows), p.scale_dtype))
        buffers.append(plgpu.SMEM((stages, 2, groups, tokens), jnp.float32))
    arity = len(buffers)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((splits, tokens, p.out), jnp.float32),
        grid=(p.out // rows, splits),
        grid_names=("rows", "split"),
        scratch_types=(
            *buffers,
            plgpu.SMEM((tokens, rows), jnp.float32, transforms=swizzled(rows, jnp.float32)),
            plgpu.Barrier(num_arrivals=arity - 1 + groups, num_barriers=stages),
        ),
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
    )
