"""Both ways to launch a Triton kernel make one call of the kernel, which writes in place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu_compile


@pytest.mark.parametrize(
    ("way", "target"), [("plugin", "triton_kernel_call_ffi"), ("jax_triton", "triton_kernel_call")]
)
def test_one_call_in_place(way, target):
    """In a process of its own, where Triton does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    command = [sys.executable, "-m", "tests.gpu_compile.lower_launch", way]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert re.search(r"custom_call @(\w+)\(", line)[1] == target
    assert line.count("output_operand_alias<") == 2
