"""Mosaic GPU's kernels compile for an H200, and spill no register. (Triton's: ``scripts/kernel_resources.py``.)"""

from __future__ import annotations

import re

import pytest

from pallas_kernels import dispatch
from tests.gpu_compile import process

pytestmark = [pytest.mark.gpu_compile, pytest.mark.timeout(900)]
OPS = [op for op, names in dispatch.IMPLEMENTATIONS["cuda"].items() if "mosaic" in names]


@pytest.mark.parametrize("op", OPS)
def test_no_default_tile_spills(op, tmp_path):
    compiled = process.run("compile_mosaic", op, MOSAIC_GPU_DUMP_PTXAS="1", MOSAIC_GPU_DUMP_TO=str(tmp_path))
    assert len(compiled.splitlines()) >= 6
    reports = [file.read_text() for file in tmp_path.glob("*.ptxas")]  # alike kernels are compiled once
    assert reports
    for report in reports:
        counts = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", report)
        assert counts == ["0", "0", "0"], report
