"""Occupancy by hand-worked cases, and the table's own reading, writing and judgement. The kernels themselves are
compiled by ``scripts/kernel_resources.py --check``; under pytest Triton interprets."""

import dataclasses

import pytest

from pallas_kernels.occupancy import blocks_per_sm
from pallas_kernels.resource_table import faults, read, write
from pallas_kernels.resources import Row

ROW = Row("op", "T=8 format=int8", "_kernel", 90, "heads=8 warps=4", 4, 3, 64, 0, 1024, 8)
UNCOVERED = Row("op", "T=8 format=fp8", "none", 80, "no fp8 before compute capability 8.9")


@pytest.mark.parametrize(
    ("capability", "warps", "registers", "shared", "blocks"),
    [
        (80, 4, 32, 0, 16),  # 64 warps
        (86, 4, 32, 0, 12),  # 48 warps
        (89, 1, 16, 0, 24),  # 24 blocks
        (90, 1, 16, 0, 32),  # 32 blocks
        (90, 4, 255, 0, 2),  # 255 * 32 registers, up to 8192: 2 warps a partition
        (90, 4, 34, 0, 12),  # 34 * 32 registers, up to 1280: 12 warps a partition
        (90, 8, 255, 0, 1),
        (90, 16, 255, 0, 0),  # more registers than there are
        (80, 4, 32, 163 * 1024, 1),
        (80, 4, 32, 81 * 1024, 2),  # 1 KiB more each for the system: 164
        (80, 4, 32, 82 * 1024, 1),
        (86, 4, 32, 100 * 1024, 0),
        (100, 4, 32, 75 * 1024, 3),
    ],
)
def test_blocks_of_a_multiprocessor(capability, warps, registers, shared, blocks):
    assert blocks_per_sm(capability, warps, registers, shared) == blocks


def test_an_unknown_capability_is_named():
    with pytest.raises(ValueError, match="70"):
        blocks_per_sm(70, 4, 32, 0)


def test_the_table_is_read_as_it_was_written():
    rows = [ROW, UNCOVERED, dataclasses.replace(ROW, op="other"), dataclasses.replace(ROW, op="other", problem="T=9")]
    assert read(write(rows, "3.9.0")) == ("3.9.0", rows)


def test_a_true_table_has_no_faults():
    assert faults([ROW, UNCOVERED], "3.9.0", write([ROW, UNCOVERED], "3.9.0")) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"spills": 16}, "spills 16 bytes"),
        ({"blocks": 0}, "cannot be launched"),
        ({"registers": 0}, "does not compile"),
    ],
)
@pytest.mark.parametrize("version", ["3.9.0", "3.6.0"])
def test_a_bad_default_tile_is_a_fault_in_a_true_table_too(change, word, version):
    bad = dataclasses.replace(ROW, **change)
    (fault,) = faults([bad], version, write([bad], "3.9.0"))
    assert "_kernel" in fault
    assert word in fault


@pytest.mark.parametrize("committed", ["", write([UNCOVERED], "3.9.0"), write([ROW, UNCOVERED], "3.9.0")])
def test_a_table_that_differs_is_out_of_date(committed):
    assert faults([dataclasses.replace(ROW, registers=65), UNCOVERED], "3.9.0", committed)


def test_another_triton_may_take_other_registers_but_not_other_tiles():
    table = write([ROW], "3.9.0")
    assert faults([dataclasses.replace(ROW, registers=65)], "3.6.0", table) == []
    assert faults([dataclasses.replace(ROW, tile="heads=4 warps=4")], "3.6.0", table)
