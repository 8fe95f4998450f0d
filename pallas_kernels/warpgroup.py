"""What a warpgroup of a Pallas Mosaic GPU kernel does, said once for Hopper and for the simulator on a CPU.

The simulator (``interpret``, see ``jax.experimental.pallas.mosaic_gpu.InterpretGPUParams``) runs a kernel's copies,
barriers and loops on memory that starts as NaN and, since jax 0.11, reports races. It knows no register layouts, no
transposed references and no accumulator that starts from a value; so there a product is plain JAX on what the
references hold.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

Operand = Any  # a reference to shared memory, or (only as the left one) a value in registers


def swizzled(columns: int, dtype: jnp.dtype) -> tuple[Any, ...]:
    """Transforms of shared memory that is read without bank conflicts: tiles of 8 rows of up to 128 bytes (PTX ISA,
    matrix descriptors)."""
    itemsize = jnp.dtype(dtype).itemsize
    row_bytes = math.gcd(128, columns * itemsize)
    return plgpu.TilingTransform((8, row_bytes // itemsize)), plgpu.SwizzleTransform(row_bytes)


# exp2 is one instruction then, of relative error 2^-22 (CUDA C++ Programming Guide, intrinsic functions); so is tanh,
# of error 2^-11: do without it.
COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True)


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A reference to shared memory, its rows read as columns."""

    ref: Any


@dataclasses.dataclass(frozen=True)
class Warpgroup:
    """``interpret``: parameters of the simulator, None on a GPU."""

    interpret: Any = None

    def dot(self, *pairs: tuple[Operand, Operand], acc: jax.Array | None = None) -> jax.Array:
        """``acc`` plus the sum of ``a @ b``, f32[M, N], awaited; a [M, K], M a multiple of 64, b [K, N], N of 8."""
        if self.interpret is not None:
            products = [jnp.dot(_value(a), _value(b), preferred_element_type=jnp.float32) for a, b in pairs]
            return sum(products[1:], products[0]) if acc is None else sum(products, acc)
        pairs = [(_ref(a), _ref(b)) for a, b in pairs]

        def multiply(acc_ref: Any) -> None:
            for a, b in pairs:
                plgpu.wgmma(acc_ref, a, b)

        if acc is not None:
            return pl.run_state(multiply)(plgpu.ACC.init(acc))

        def fresh(acc_ref: Any) -> jax.Array:
            multiply(acc_ref)
            return acc_ref[...]

        a, b = pairs[0]
        return pl.run_scoped(fresh, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))

    def laid_out(self, x: jax.Array, layout: Any) -> jax.Array:
        """``x`` with this layout of registers."""
        return x if self.interpret is not None else plgpu.layout_cast(x, layout)

    def store_transposed(self, ref: Any, x: jax.Array) -> None:
        """``ref[...] = x.T``; x [M, N] is laid out as a result of ``dot``."""
        if self.interpret is not None:
            ref[...] = x.T
        else:
            _ref(Transposed(ref))[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def _value(x: Operand) -> jax.Array:
    return x.ref[...].T if isinstance(x, Transposed) else x[...]


def _ref(x: Operand) -> Any:
    return x.ref.transpose((1, 0)) if isinstance(x, Transposed) else x
