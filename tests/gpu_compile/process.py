"""Processes that compile for a GPU that is not there: under pytest Triton interprets, and the environment says how jax
starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(module: str, *arguments: str, **environment: str) -> str:
    """What ``python -m tests.gpu_compile.<module>`` prints; it has to end well."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.gpu_compile.{module}", *arguments],
        cwd=Path(__file__).parents[2],
        env={**inherited, "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
