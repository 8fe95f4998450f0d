"""INT4 matmul in Mosaic GPU, in its simulator, on what it covers: few tokens, 64 outputs at a time."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quant_matmul import mosaic
from pallas_kernels.target import A100, H200
from tests.kernels import simulator
from tests.kernels.quant_matmul.body import QuantMatmulBody, make_problem

# Inputs and tokens that are padded. Five steps, three and two in splits of their own; and three steps in one.
ZEROS = make_problem(("int4", 64, True), 11, 128, 600)
SYMMETRIC = make_problem(("int4", 128, False), 5, 64, 1400, "float16", "float32")
TILES = {ZEROS: {"rows": 128, "splits": 2}, SYMMETRIC: {"groups": 2}}


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options={"xla_backend_optimization_level": 0})
def multiply(problem, tile, *arrays):
    return mosaic.run(problem, dict(tile), None, *arrays, interpret=simulator.parameters())


class TestMosaic(QuantMatmulBody):
    kinds = (("int4", 64, True), ("int4", 128, False))
    most = 64
    # Other sizes and types: refused, see test_what_it_does_not_cover, or one program each, too slow to simulate.
    test_sizes = test_equals_the_float64_sum = None
    test_tokens_of_zeros_and_of_tiny_values = test_what_lies_beyond_the_inputs_is_not_read = None

    def matmul(self, problem, *arrays):
        """By the fewest stages, so that slots come round; outputs padded to 64."""
        pad = -problem.out % 64
        whole = dataclasses.replace(problem, out=problem.out + pad)
        tile = {"rows": 64, "groups": 1, "stages": 2, "splits": 1, **TILES.get(problem, {})}
        assert any(tile == {**other, "splits": tile["splits"]} for other in mosaic.tiles(whole, H200))
        x, codes, *scales = arrays
        codes = jnp.pad(codes, ((0, pad), (0, 0)))
        scales = [None if a is None else jnp.pad(a, ((0, 0), (0, pad))) for a in scales]
        return multiply(whole, tuple(tile.items()), x, codes, *scales)[:, : problem.out]

    @pytest.mark.parametrize("case", [ZEROS, SYMMETRIC], ids=["zero points", "symmetric"])
    def test_formats_and_types(self, case):
        self.check(case)
        x = np.random.default_rng(1).normal(size=(case.T, case.width))
        x[::3] = 0
        for power in (-3, 3):
            self.check(case, 1, (x * 10.0**power).astype(case.dtype))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": "int2"}, "multiplies int4"),
        ({"dtype": "float32"}, "multiplies int4"),
        ({"group": 32}, "groups of 64 or 128"),
        ({"T": 0}, "not 0"),
        ({"T": 65}, "not 65"),
        ({"out": 100}, "multiple of 64"),
        ({"out": 0}, "multiple of 64"),
        ({"width": 0}, "no inputs"),
    ],
)
def test_what_it_does_not_cover(change, why):
    with pytest.raises(NotImplementedError, match=why):
        mosaic.tiles(dataclasses.replace(ZEROS, **change), H200)


def test_other_capabilities_are_refused():
    with pytest.raises(NotImplementedError, match=r"capability 9\.0"):
        mosaic.tiles(ZEROS, A100)
