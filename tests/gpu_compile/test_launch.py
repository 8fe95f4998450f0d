"""Both ways to launch a Triton kernel make one call of the kernel, which writes in place."""

from __future__ import annotations

import re

import pytest

from tests.gpu_compile import process

pytestmark = pytest.mark.gpu_compile


@pytest.mark.parametrize(
    ("way", "target"), [("plugin", "triton_kernel_call_ffi"), ("jax_triton", "triton_kernel_call")]
)
def test_one_call_in_place(way, target):
    (line,) = process.run("lower_launch", way).splitlines()
    assert re.search(r"custom_call @(\w+)\(", line)[1] == target
    assert line.count("output_operand_alias<") == 2
