"""A calibrated conversion that was killed goes on at the layer it had not done, to the same bytes."""

from __future__ import annotations

import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxsqueeze.checkpoint.calibration import layer
from jaxsqueeze.checkpoint.calibration.text import Calibration
from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.manifest import read_manifest
from jaxsqueeze.checkpoint.store import load_params
from jaxsqueeze.quant.scheme import Recipe

RECIPE = Recipe("int4", 32, True, keep=("layers_1/attn/o/weight",))
# Dies at the first step of the report after its second layer was stored.
KILLED = """
import os, signal, sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
from jaxsqueeze.checkpoint.calibration.text import Calibration
from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.quant.scheme import Recipe

source, out, text = map(Path, sys.argv[1:])

def report(stage, done, total):
    if (out.with_name("out.calibration") / "layers_1.key").exists():
        os.kill(os.getpid(), signal.SIGKILL)

recipe = Recipe("int4", 32, True, keep=("layers_1/attn/o/weight",))
convert(HFFolder(source), out, name="q", recipe=recipe, calibration=Calibration(text, 600), report=report)
"""


def test_killed_midway(folder, text, tmp_path, monkeypatch):
    out, work = tmp_path / "out", tmp_path / "out.calibration"
    run = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(out), str(text)], timeout=200)
    assert run.returncode == -signal.SIGKILL
    assert not out.exists()
    assert {p.name for p in work.glob("*.key")} == {"layers_0.key", "layers_1.key"}
    (work / "notes").write_text("of somebody else")

    calibrated = []
    quantise = layer.quantise
    monkeypatch.setattr(layer, "quantise", lambda cfg, *rest: calibrated.append(1) or quantise(cfg, *rest))
    steps = []

    def report(stage: str, done: int, total: int) -> None:
        if stage == "calibrating":
            steps.append((done, total))

    options = {"name": "q", "recipe": RECIPE, "calibration": Calibration(text, 600)}
    convert(HFFolder(folder), out, report=report, **options)
    assert len(calibrated) == 1
    assert steps[-1][0] == steps[-1][1]
    assert [p.name for p in work.iterdir()] == ["notes"]

    convert(HFFolder(folder), tmp_path / "whole", **options)
    assert len(calibrated) == 1 + 3
    found, right = (load_params(folder) for folder in (out, tmp_path / "whole"))
    assert jax.tree.structure(found) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    a, b = (read_manifest(folder) for folder in (out, tmp_path / "whole"))
    assert (a.schemes, a.source_hash, a.quantisation) == (b.schemes, b.source_hash, b.quantisation)


def test_layers_of_another_run_are_not_taken(folder, text, tmp_path, monkeypatch):
    """Only those whose own scheme, and the schemes of all before them, are the same."""

    class Stop(Exception):
        pass

    def stop_at_the_end(stage: str, done: int, total: int) -> None:
        if stage == "converting" and done == total:
            raise Stop

    calibrated = []
    quantise = layer.quantise
    monkeypatch.setattr(layer, "quantise", lambda cfg, *rest: calibrated.append(1) or quantise(cfg, *rest))

    def run(expected: int, tokens: int = 600, **recipe) -> None:
        calibrated.clear()
        options = {"recipe": Recipe(**recipe), "calibration": Calibration(text, tokens), "report": stop_at_the_end}
        with pytest.raises(Stop):
            convert(HFFolder(folder), tmp_path / "out", name="q", **options)
        assert len(calibrated) == expected

    base = {"weights": "int8"}
    run(3, **base)
    run(0, **base)
    (tmp_path / "out.calibration" / "layers_2.key").unlink()
    run(1, **base, keep=("layers_1/*",))  # the last layer; the second one has nothing left to calibrate
    run(3, 300, **base)
