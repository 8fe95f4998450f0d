"""Decode attention in Mosaic GPU, in its simulator, on what it covers: few queries a KV head over whole pages."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels.paged_attention import mosaic
from pallas_kernels.target import A100, H200
from tests.kernels import simulator
from tests.kernels.paged_attention.body import PagedAttentionBody, problem
from tests.kernels.paged_attention.build import batches, decode
from tests.kernels.properties import PROPERTY

ROWS = problem(2, 1, 2, 3, 64, 32, 7, "bfloat16", sinks=True)  # four blocks in two splits
VERIFY = problem(2, 3, 1, 3, 128, 16, 14, "float16", window=150, softcap=2.0, sinks=True)  # up to four blocks in one


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options={"xla_backend_optimization_level": 0})
def attend(problem, tile, *arrays):
    return mosaic.run(problem, dict(tile), None, *arrays, interpret=simulator.parameters())


class TestMosaic(PagedAttentionBody):
    test_formats = test_nothing_to_do = None  # refused: test_what_it_does_not_cover
    # Of float32 and pages of two: here test_ragged_rows has windows, sinks and caps.
    test_window_of_four_over_six_tokens = test_a_sink_takes_its_share_once = test_scores_are_capped_after_scaling = None

    def attend(self, problem, *arrays):
        """By small blocks and the fewest stages: slots come round."""
        tile = {"keys": 64, "stages": 2, "splits": 1 if problem == VERIFY else 2}
        assert any(tile == {**other, "splits": tile["splits"]} for other in mosaic.tiles(problem, H200))
        return attend(problem, tuple(tile.items()), *arrays)

    @pytest.mark.parametrize("case", [ROWS, VERIFY], ids=["decode, sinks", "verify, window, cap"])
    def test_ragged_rows(self, case):
        @settings(PROPERTY, max_examples=3)
        @given(batches(case))
        def check(batch):
            self.check(batch)

        check()

    @pytest.mark.parametrize("offset", [-1, 0, 1])
    def test_page_and_block_borders(self, offset):
        for ends in ([64, 96], [128, 192]):
            self.check(decode(ROWS, [end + offset for end in ends]))

    def test_head_sizes(self):
        """64 and 128 are those of the ragged rows."""
        self.check(decode(problem(1, 1, 1, 5, 256, 64, 2, "bfloat16", scale=1 / 16), [101]))

    def test_masked_rows_are_zero(self):
        assert not self.check(decode(ROWS, [0, 0])).any()

    def test_scores_far_apart_neither_overflow_nor_vanish(self):
        """By queries of 2^13 times the size: the same program."""
        batch = decode(dataclasses.replace(ROWS, scale=ROWS.scale * 2**13), [200, 100], seed=3)
        (q, *arrays), right = batch.arrays(self.junk_in_v)
        out = np.asarray(self.attend(ROWS, q * 2**13, *arrays), np.float64)
        np.testing.assert_allclose(out, right, rtol=0, atol=2**-8 * np.abs(right).max())  # bfloat16

    def test_scores_below_zero(self):
        self.check(decode(ROWS, [200, 100], below=True))

    def test_nan_of_a_failed_request_stays_in_its_row(self):
        batch = decode(ROWS, [140, 140])
        arrays, right = batch.arrays(self.junk_in_v)
        arrays[1] = arrays[1].at[arrays[3][0, 2]].set(np.nan)
        out = np.asarray(self.attend(batch.problem, *arrays), np.float64)
        assert np.isnan(out[0]).all()
        np.testing.assert_allclose(out[1], right[1], atol=0.02)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"k_format": "int8"}, "pages as they are"),
        ({"v_format": "int4"}, "pages as they are"),
        ({"dtype": "float32"}, "pages as they are"),
        ({"Q": 22}, "not 22 x 3"),
        ({"Q": 0}, "not 0 x 3"),
        ({"D": 80}, "heads of"),
        ({"page_size": 4}, "pages of"),
        ({"N": 0}, "no rows"),
        ({"D": 256, "Q": 20}, "do not fit"),
    ],
)
def test_what_it_does_not_cover(change, why):
    with pytest.raises(NotImplementedError, match=why):
        mosaic.tiles(dataclasses.replace(ROWS, **change), H200)


def test_other_capabilities_are_refused():
    with pytest.raises(NotImplementedError, match=r"capability 9\.0"):
        mosaic.tiles(ROWS, A100)
