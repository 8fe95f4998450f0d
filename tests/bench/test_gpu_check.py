"""The check on a GPU, as far as there is one to be had: sizes are tiny, plain JAX stands for the kernels.

The supervisor is shown every way in which a case can end a process.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from rich.console import Console

from jaxsqueeze.bench.gpu_check import captured, command, correctness, report, speed, supervisor, whole_model, worker
from jaxsqueeze.bench.gpu_check.case import Setting
from jaxsqueeze.bench.gpu_check.decoding import FEW, MANY, Figures
from jaxsqueeze.bench.gpu_check.supervisor import Outcome, Part
from jaxsqueeze.bench.gpu_check.targets import judge
from pallas_kernels import dispatch
from pallas_kernels.target import CPU, H200

ROOT = Path(__file__).parents[2]


def supervise(module: str, out: Path, *, seconds: float = 120, stall_s: float = 120) -> tuple[Outcome, list[str]]:
    said: list[str] = []
    part = Part("part", f"tests.bench.{module}", seconds, stall_s)
    outcome = supervisor.run(part, out, quick=True, deadline=time.monotonic() + 600, say=said.append)
    return outcome, said


def run_here(cases) -> dict[str, dict]:
    lines = io.StringIO()
    worker.run(cases, lines)
    entries = [json.loads(line) for line in lines.getvalue().splitlines()]
    return {entry.pop("case"): entry for entry in entries}


def test_every_case_ends_whatever_the_others_do(tmp_path):
    outcome, said = supervise("gpu_check_cases", tmp_path, stall_s=3)
    results = outcome.results
    assert {name: result["state"] for name, result in results.items()} == {
        "one": "done",
        "fails": "failed",
        "not covered": "not covered",
        "loses": "failed",
        "two": "done",
        "hangs": "failed",
        "dies": "failed",
        "three": "done",
    }
    assert results["one"]["made"] == 17
    assert results["one"]["quick"] is True
    assert results["fails"]["reason"] == "ValueError: first line"
    assert results["not covered"]["reason"] == "only on Tuesdays"
    assert "ILLEGAL_ADDRESS" in results["loses"]["reason"]
    assert results["hangs"]["reason"] == "nothing happened for 3 s"
    assert results["dies"]["reason"].startswith("the process ended with code -6: ")
    assert outcome.device == "cpu"
    assert not outcome.note
    assert len(said) == 8


def test_a_compiler_that_kills_its_process_costs_one_case(tmp_path):
    outcome, _ = supervise("gpu_check_dying_compiler", tmp_path)
    assert [result["state"] for result in outcome.results.values()] == ["done", "failed", "done"]
    assert not outcome.note


def test_a_part_that_cannot_begin_says_why(tmp_path):
    outcome, _ = supervise("there_is_no_such_module", tmp_path)
    assert not outcome.results
    assert "No module named 'tests.bench.there_is_no_such_module'" in outcome.note


def test_what_does_not_fit_into_the_time_is_skipped(tmp_path):
    outcome, _ = supervise("gpu_check_cases", tmp_path, seconds=0)
    assert outcome.note == "out of time"
    assert all(result["state"] == "skipped" for result in outcome.results.values())


def test_the_command_from_a_checkout(tmp_path):
    command = [sys.executable, ROOT / "scripts/gpu_check.py", "--quick", "--part", "correctness", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    cases = found["parts"]["correctness"]["cases"]
    assert len(cases) >= len(correctness.PROBLEMS)
    assert all(case["state"] == "done" and case["error"] <= case["limit"] for case in cases.values())
    assert found["machine"]["command"].startswith("python scripts/gpu_check.py --quick")
    assert "kv_write reference" in done.stdout
    assert "not measured" in done.stdout


def test_a_cpu_is_not_taken_for_a_gpu(tmp_path):
    command = [sys.executable, ROOT / "scripts/gpu_check.py", "--part", "speed", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "speed: the process ended with code 1: jax sees no GPU here: see that nvidia-smi lists one" in done.stdout


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("where the folder should be")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["--out", str(tmp_path / "file")]), []) == 2
    assert "gpu_check: cannot make the folder" in capsys.readouterr().err


def test_ops_and_ceilings_are_timed(tmp_path):
    results = run_here(speed.cases(Setting(CPU, True, tmp_path)))
    assert [r["state"] for r in results.values()] == ["done"] * len(results)
    assert {r["op"] for r in results.values() if "op" in r} == set(correctness.PROBLEMS)
    assert all(r["us"] > 0 for r in results.values())
    top = report.ceilings({"speed": Outcome(results)})
    assert set(top) == {"copy", "read", "matmul"}
    assert all(rate > 0 for rate in top.values())


@pytest.fixture
def quick_to_compile():
    """XLA optimises nothing: here nobody waits for what it compiles."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_a_model_decodes_through_the_runner(tmp_path, quick_to_compile):
    (case,) = whole_model.cases(Setting(CPU, True, tmp_path))
    result = run_here([case])[case.name]
    assert result["state"] == "done", result
    (at,) = result["by_rows"]
    assert at["rows"] == 2
    assert at["tokens_per_s"] == pytest.approx(2e6 / at["step_us"])
    assert at["gb_per_s"] > 0
    assert result["prefill_tokens_per_s"] > 0
    assert (tmp_path / result["trace"]).stat().st_size > 1000


def test_every_kernel_is_checked_and_timed_on_a_gpu(tmp_path):
    setting = Setting(H200, False, tmp_path)
    names = {case.name.partition(":")[0] for case in correctness.cases(setting)}
    known = dispatch.IMPLEMENTATIONS["cuda"]
    assert names == {f"{op} {name}" for op, found in known.items() for name in (*found, "reference")}
    timed = [case.name for case in speed.cases(setting)]
    assert len(set(timed)) == len(timed)
    for name in ("triton", "mosaic", "reference"):
        assert f"attention 64 x 8k bf16: {name}" in timed
    assert len(whole_model.cases(setting)) == 6
    assert len(captured.cases(setting)) == 3


def test_the_host_gap_is_what_dispatches_cost_beyond_their_steps():
    figures = Figures(one=1.5e-3, few=FEW * 1e-3 + 5e-4, many=MANY * 1e-3 + 5e-4, spread=0, step_bytes=0)
    assert figures.step == pytest.approx(1e-3)
    assert figures.gap(figures.few, FEW) == pytest.approx(0.5 / 4.5)
    assert figures.gap(figures.one, 1) == pytest.approx(1 / 3)


def figures(**more: object) -> dict:
    return {"state": "done", "us": 10.0, "spread": 0.1, "gb_per_s": 800.0, "tflop_per_s": 0.0, **more}


RESULTS = {
    "correctness": Outcome(
        {
            "op triton: a": {"state": "done", "error": 2e-3},
            "op triton: b": {"state": "failed", "reason": "AssertionError: error 3.0e-01, allowed 1e-02"},
            "op mosaic: a": {"state": "not covered", "reason": "heads of 64"},
            "op mosaic: b": {"state": "skipped", "reason": "out of time"},
        },
        note="out of time",
    ),
    "speed": Outcome(
        {
            "ceiling copy": figures(ceiling="copy", gb_per_s=1000.0),
            "a: triton": figures(label="a", op="paged_attention", implementation="triton", bound="bytes", chosen=True),
            "a: mosaic": figures(
                label="a", op="paged_attention", implementation="mosaic", bound="bytes", chosen=False, us=12.0
            ),
            "a: reference": figures(
                label="a", op="paged_attention", implementation="reference", bound="bytes", chosen=False, us=30.0
            ),
        }
    ),
    "models": Outcome(
        {
            "llama-8b int8": {
                "state": "done",
                "model": "llama-8b",
                "weights": "int8",
                "prefill_tokens_per_s": 9000.0,
                "by_rows": [
                    {
                        "rows": 1,
                        "tokens_per_s": 90.0,
                        "step_us": 11000.0,
                        "device_us": 10900.0,
                        "gb_per_s": 740.0,
                        "host_gap": 0.01,
                        "host_gap_single": 0.04,
                        "spread": 0.002,
                    }
                ],
                "trace_rows": 1,
                "kernel_us": 10500.0,
                "kernels": {"_long_name": 4000.0},
            }
        }
    ),
}


def test_targets_are_met_missed_or_not_measured():
    ops, models = (report.done(RESULTS[name]) for name in ("speed", "models"))
    states = {t.name: (t.reached_text, t.state) for t in judge(ops, models, report.ceilings(RESULTS))}
    assert states == {
        "8B bf16 decode, 1 row: bandwidth": ("-", "not measured"),
        "8B int8 decode, 1 row: bandwidth": ("74.0%", "missed"),
        "8B int4 decode, up to 16 rows (1, 8): bandwidth": ("-", "not measured"),
        "decode attention at 8k, all rows and formats: bandwidth": ("80.0%", "met"),
        "host gap, steps dispatched as served": ("1.0%", "met"),
        "host gap, steps dispatched singly": ("4.0%", "missed"),
    }


def test_the_report_holds_everything_on_little_room():
    console = Console(width=120, record=True, file=io.StringIO())
    ops, models = (report.done(RESULTS[name]) for name in ("speed", "models"))
    targets = judge(ops, models, report.ceilings(RESULTS))
    report.print_all(console, RESULTS, targets)
    text = console.export_text()
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert "correctness: op triton: b: FAILED: AssertionError: error 3.0e-01, allowed 1e-02" in lines
    assert "correctness: 1 cases skipped, the first was op mosaic: b" in lines
    assert "op triton 1 1 0 0 2.0e-03" in lines
    assert "op mosaic 0 0 1 1 -" in lines
    assert "a triton 10.0 10% 800 GB/s 80% 30.0 3.00 mosaic 12.0" in lines
    assert "llama-8b int8 1 90 11000 0% 740 74% 1.0% 4.0% 9000" in lines
    assert "4000.0 _long_name" in lines
    assert json.loads(json.dumps(report.as_json(RESULTS, targets, {"cpu": "x"})))["ceilings"] == {"copy": 1000.0}
