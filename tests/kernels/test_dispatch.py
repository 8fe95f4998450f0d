"""The choice between implementations: what it picks, what it says, and that a broken kernel harms nobody."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, tuning
from pallas_kernels.kv_write import reference
from pallas_kernels.kv_write import triton as kv_write_triton
from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.kv_write.problem import Problem
from pallas_kernels.linear.problem import Problem as LinearProblem
from pallas_kernels.target import A100, CPU, H200, Target

PROBLEM = Problem(T=2, K=2, D=8, page_size=4, dtype="float32", format="same")


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    """No choice is remembered from other tests, and no tuned table of this repository is read."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    dispatch.choose.cache_clear()
    yield
    dispatch.choose.cache_clear()


def write(target: Target) -> np.ndarray:
    place = jnp.array([1, 1], jnp.int32), jnp.array([0, 3], jnp.int32)
    pages, scales = kv_write(jnp.zeros((2, 2, 4, 8)), None, jnp.ones((2, 2, 8)), *place, target=target)
    assert scales is None
    return np.asarray(pages)


def tune(target: Target, **entry: object) -> None:
    full = {"tile": {}, "us": 2.0, "reference_us": 3.0} | entry
    tuning.path(target.kind).write_text(json.dumps({"kv_write": {PROBLEM.key: full}}))


def test_says_which_implementation_and_tile_and_why():
    fields = {"T": 2, "K": 2, "D": 8, "page_size": 4, "dtype": "float32", "format": "same"}
    assert dispatch.explain("kv_write", fields, H200) == "kv_write: triton (heads=2, warps=1): default tile"
    assert dispatch.explain("kv_write", PROBLEM, CPU) == "kv_write: reference: the only one for cpu"


def test_the_readme_shows_what_it_says(capsys):
    gpu = (Path(__file__).parents[2] / "README.md").read_text().partition("## On a GPU")[2]
    code = gpu.partition("```python\n")[2].partition("```")[0]
    exec(code, {})
    assert code.endswith(f"# {capsys.readouterr().out}")


def test_says_why_not_the_others():
    text = dispatch.explain("kv_write", Problem(2, 2, 8, 4, "bfloat16", "bits"), A100)
    assert text == "kv_write: reference: plain JAX\n  not triton: pools of bit patterns exist on CPU only"
    two_rows = LinearProblem(T=2, out=4, width=8, dtype="bfloat16", bits=True)
    assert "not lanes: it takes one row" in dispatch.explain("linear", two_rows, CPU)


def test_an_unknown_op_is_an_error():
    with pytest.raises(ValueError, match="no op 'kv_wriet'"):
        dispatch.explain("kv_wriet", PROBLEM, CPU)


def test_a_measured_tile_beats_the_default_and_only_on_its_device():
    tune(H200, implementation="triton", tile={"heads": 1, "warps": 2})
    assert dispatch.explain("kv_write", PROBLEM, H200) == (
        "kv_write: triton (heads=1, warps=2): measured 2.0 us, XLA 3.0 us"
    )
    assert "default tile" in dispatch.explain("kv_write", PROBLEM, A100)


def test_xla_stays_where_it_was_measured_faster():
    tune(H200, implementation="reference", us=3.0)
    assert dispatch.explain("kv_write", PROBLEM, H200) == "kv_write: reference: measured 3.0 us, XLA 3.0 us"


def test_a_kernel_that_does_not_compile_is_reported_once_and_its_fallback_serves(monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("ptxas fatal: out of registers\nmore lines")

    monkeypatch.setattr(kv_write_triton, "run", broken)
    with caplog.at_level(logging.WARNING):
        first, second = write(H200), write(H200)
    right = np.zeros((2, 2, 4, 8))
    right[1, :, [0, 3]] = 1
    np.testing.assert_array_equal(first, right)
    np.testing.assert_array_equal(second, right)
    assert "not triton: it does not work here (RuntimeError: ptxas fatal" in (
        dispatch.explain("kv_write", PROBLEM, H200, compile=True)
    )
    (record,) = caplog.records
    assert record.getMessage() == (
        "kv_write on NVIDIA H200: reference serves instead of triton (RuntimeError: ptxas fatal: out of registers)"
    )


def test_a_measured_tile_that_does_not_compile_is_reported_and_the_default_one_serves(monkeypatch, caplog):
    def broken(problem, tile, launcher, *arrays):
        if tile == {"heads": 1, "warps": 64}:
            raise RuntimeError("too many warps")
        return reference.run(problem, *arrays)

    monkeypatch.setattr(kv_write_triton, "run", broken)
    tune(H200, implementation="triton", tile={"heads": 1, "warps": 64})
    write(H200)
    choice = dispatch.choose("kv_write", PROBLEM, H200, True)
    assert str(choice) == (
        "kv_write: triton (heads=2, warps=1): default tile\n"
        "  not triton as tuned: it does not work here (RuntimeError: too many warps)"
    )
    (record,) = caplog.records
    assert record.getMessage() == (
        "kv_write on NVIDIA H200: triton serves instead of triton as tuned (RuntimeError: too many warps)"
    )


def test_a_measured_implementation_that_does_not_exist_is_passed_over():
    tune(H200, implementation="fastest")
    text = dispatch.explain("kv_write", PROBLEM, H200)
    assert "kv_write: triton (heads=2, warps=1): default tile\n  not fastest as tuned: it does not work" in text


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"kv_write": {',
        "[]",
        '{"kv_write": []}',
        json.dumps({"kv_write": {PROBLEM.key: "triton"}}),
        json.dumps({"kv_write": {PROBLEM.key: {"implementation": "triton", "tile": {}}}}),
        json.dumps({"kv_write": {PROBLEM.key: {"implementation": "triton", "tile": 3, "us": 1, "reference_us": 1}}}),
        json.dumps(
            {"kv_write": {PROBLEM.key: {"implementation": "triton", "tile": {}, "us": None, "reference_us": 1}}}
        ),
    ],
)
def test_a_damaged_table_is_reported_once_and_default_tiles_serve(text, caplog):
    tuning.path(H200.kind).write_text(text)
    for dtype in ("float32", "float16"):
        problem = dataclasses.replace(PROBLEM, dtype=dtype)
        assert "triton (heads=2, warps=1): default tile" in dispatch.explain("kv_write", problem, H200)
    (record,) = caplog.records
    assert f"cannot read {tuning.path(H200.kind)}" in record.getMessage()
    assert "scripts/tune.py" in record.getMessage()


def test_an_unknown_platform_is_refused():
    class Device:
        platform = "tpu"

    with pytest.raises(ValueError, match="tpu"):
        Target.of(Device())
