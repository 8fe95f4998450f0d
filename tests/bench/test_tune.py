"""The tuner: what it measures for a model is what the model runs, wrong candidates lose, XLA keeps what it does best.

On a CPU, with candidates made for the test: one is plain JAX under another name, the others are slow, wrong or broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from rich.console import Console

from jaxsqueeze.bench import random_model, timing, tune, tune_command
from jaxsqueeze.bench.model_problems import problems
from jaxsqueeze.bench.timing import Timing
from jaxsqueeze.config import PREFILL_ROW, EngineConfig, KVDtypes
from jaxsqueeze.kv.pool import abstract_pool, storage
from jaxsqueeze.models.attention import GroupPages
from jaxsqueeze.models.config import LayerConfig
from jaxsqueeze.models.decoder import Decoder
from jaxsqueeze.runner.buckets import decode_sizes, make_buckets
from jaxsqueeze.runner.state import initial_state
from jaxsqueeze.runner.steps import DecodeInputs, PrefillInputs, decode_n, mixed
from jaxsqueeze.sched import table_width
from pallas_kernels import dispatch, tuning
from pallas_kernels.quant_matmul import reference
from pallas_kernels.quant_matmul.problem import Problem
from pallas_kernels.target import CPU

ROOT = Path(__file__).parents[2]
PROBLEM = Problem(2, 16, 32, "float32", "int8")
TARGET = dataclasses.replace(CPU, kind="made for a test")
RIGHT, SLOW, WRONG, BROKEN, RACING = range(5)


def run(problem, tile, launcher, x, codes, scales, zeros):
    """Plain JAX, or what the tile says."""
    y = reference.run(problem, x, codes, scales, zeros)
    if tile["kind"] == SLOW:
        y = lax.fori_loop(0, 1000, lambda _, z: y + 0 * reference.run(problem, x + z.sum(), codes, scales, zeros), y)
    if tile["kind"] == WRONG:
        return y.at[0, 0].add(1.0)
    if tile["kind"] == BROKEN:
        raise RuntimeError("no such instruction\nand a long dump")
    return y


@pytest.fixture
def kinds(monkeypatch, tmp_path):
    """Sets the kinds of candidates that the op has; tables of this repository are not read."""
    offered: list[int] = []
    made = types.SimpleNamespace(run=run, tiles=lambda problem, target: tuple({"kind": k} for k in offered))
    monkeypatch.setitem(sys.modules, "pallas_kernels.quant_matmul.made", made)
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS["cpu"], "quant_matmul", ("made",))
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(timing, "LOOP_US", 20.0)
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1)
    dispatch.choose.cache_clear()
    yield offered
    dispatch.choose.cache_clear()


def tuned(results: dict[tune.Candidate, list[float]]) -> tune.Tuned:
    return tune.Tuned("op", "key", tuple(tune.Result(c, tuple(Timing(us, 0) for us in x)) for c, x in results.items()))


def test_slow_wrong_and_broken_candidates_leave_it_to_xla(kinds):
    kinds += [SLOW, WRONG, BROKEN]
    found = tune.tune("quant_matmul", [PROBLEM], TARGET)
    assert found.winner is found.xla
    xla, slow, wrong, broken = found.results
    assert not slow.wrong
    assert slow.times[0].us > 3 * xla.times[0].us
    assert wrong.wrong.startswith("ArithmeticError: error")
    assert broken.wrong == "RuntimeError: no such instruction"
    assert found.entry == {
        "implementation": "reference",
        "tile": {},
        "us": round(xla.times[0].us, 2),
        "reference_us": round(xla.times[0].us, 2),
    }


def test_a_result_that_goes_wrong_while_it_is_timed_is_seen(kinds, monkeypatch):
    kinds += [RIGHT]
    seen = []

    def results(self):
        seen.append(real(self))
        return seen[-1] + (len(seen) == 3)  # XLA's, the candidate's first and its last

    real = timing.Run.results
    monkeypatch.setattr(timing.Run, "results", results)
    found = tune.tune("quant_matmul", [PROBLEM], TARGET)
    assert "ArithmeticError" in found.results[1].wrong
    assert found.winner is found.xla


def test_the_quickest_is_written_beside_what_others_wrote_and_is_chosen(kinds, monkeypatch, tmp_path):
    kinds += [RIGHT, SLOW]
    times = iter([30.0, 40.0, 10.0])  # XLA, then the candidates in order
    monkeypatch.setattr(timing.Run, "time", lambda self, **_: Timing(next(times), 0.01))
    table = tuning.path(TARGET.kind)
    other = {"implementation": "made", "tile": {"kind": 7}, "us": 1.0, "reference_us": 2.0}
    table.write_text(json.dumps({"quant_matmul": {"another": other}, "kv_write": {"x": other}}))
    console = Console(width=120, record=True)
    assert tune_command.measure({("quant_matmul", PROBLEM): None}, TARGET, tmp_path, console, None) == 0
    entry = {"implementation": "made", "tile": {"kind": SLOW}, "us": 10.0, "reference_us": 30.0}
    assert json.loads(table.read_text()) == {
        "kv_write": {"x": other},
        "quant_matmul": {"another": other, PROBLEM.key: entry},
    }
    assert list(tmp_path.iterdir()) == [table]
    choice = dispatch.choose("quant_matmul", PROBLEM, TARGET, False)
    assert (choice.implementation, dict(choice.tile)) == ("made", {"kind": SLOW})
    assert str(choice).endswith("measured 10.0 us, XLA 30.0 us")
    text = console.export_text()
    assert "3.00" in text  # the gain
    assert "XLA stays" not in text


def test_the_command_says_where_xla_stays_and_what_was_wrong(kinds, tmp_path):
    kinds += [WRONG]
    console = Console(width=120, record=True)
    assert tune_command.measure({("quant_matmul", PROBLEM): None}, TARGET, tmp_path, console, None) == 1
    text = console.export_text()
    assert f"XLA stays for\n  quant_matmul {PROBLEM.key}" in text
    assert f"wrong, never chosen:\n  quant_matmul {PROBLEM.key}: made kind={WRONG}: ArithmeticError" in text


def test_no_time_left_measures_nothing(kinds, tmp_path):
    kinds += [RIGHT]
    console = Console(width=120, record=True)
    assert tune_command.measure({("quant_matmul", PROBLEM): None}, TARGET, tmp_path, console, 0.0) == 0
    assert "out of time: 1 of 1 entries were not measured" in console.export_text()
    assert not list(tmp_path.iterdir())


def test_nothing_to_choose_without_an_implementation(monkeypatch):
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "cpu", {})
    assert tune.tune("quant_matmul", [PROBLEM], CPU) is None


def test_one_choice_for_all_problems_of_a_key():
    a, b = (tune.Candidate("made", (("kind", k),)) for k in range(2))
    # a loses a tenth on the first and halves the second; XLA is best nowhere.
    found = tuned({tune.XLA: [20, 9], a: [11, 2], b: [10, 4]})
    assert found.winner.candidate == a
    assert found.entry["us"] == 6.5
    assert found.entry["reference_us"] == 14.5
    few, many = (dataclasses.replace(PROBLEM, T=t) for t in (5, 7))
    assert tune.groups([("x", few), ("x", PROBLEM), ("x", many)]) == {
        ("x", few.key): [few, many],
        ("x", PROBLEM.key): [PROBLEM],
    }


def test_tiles_that_fit_some_of_the_problems_only_are_left_out(kinds, monkeypatch):
    other = dataclasses.replace(PROBLEM, T=3)
    made = sys.modules["pallas_kernels.quant_matmul.made"]
    monkeypatch.setattr(made, "tiles", lambda problem, target: ({"kind": 0}, {"kind": problem.T}))
    names = tune.candidates("quant_matmul", [PROBLEM, other], TARGET)
    assert [dict(c.tile) for c in names] == [{"kind": 0}]


@pytest.mark.parametrize("kv", ["auto", "int8", "k=int8,v=int4"])
def test_problems_of_a_model_are_what_its_programs_ask_for(kv, monkeypatch):
    """Every bucket's program is traced, and the dispatcher's callers are listened to."""
    layers = LayerConfig(), LayerConfig(window=40)
    cfg = dataclasses.replace(random_model.SHAPES["tiny"], layers=layers, attn_softcap=7.0, vocab_size=272)
    config = EngineConfig(max_slots=4, max_step_tokens=64, max_model_len=96, kv_dtype=kv)
    asked = set()

    def run(op, problem, target, *arrays):
        asked.add((op, problem))
        return dispatch.call(op, dispatch.REFERENCE, problem, {}, target, *arrays)

    dtype = jnp.dtype(jnp.float32)
    shapes = {"page_size": 16, "max_model_len": 96, "max_step_tokens": 64, "decode_steps": 4}
    widths = [table_width(group, **shapes) for group in cfg.cache_groups()]
    model = Decoder(cfg, dtype, 96, CPU)

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def pages(n):
        return tuple(GroupPages(ints(n, width), ints(n)) for width in widths)

    params, state = jax.eval_shape(lambda: initial_state(4, cfg.vocab_size))
    variables = {"params": random_model.abstract(cfg, dtype, "int4")}
    pool = abstract_pool(cfg, (9, 9), 16, storage(KVDtypes.parse(kv), dtype, "gpu"))
    device = variables, pool, state, params
    buckets = make_buckets(config, decode_sizes(4, "cpu", "float32"))
    monkeypatch.setattr(dispatch, "run", run)  # from here on: what made the parameters' shapes is no program
    for B in buckets.decode:
        jax.eval_shape(functools.partial(decode_n, model, 4), *device, DecodeInputs(ints(B), pages(B), ints()))
    for B, N in buckets.mixed:
        rows = ints(N, PREFILL_ROW)
        prefill = PrefillInputs(rows, rows, pages(N), ints(N), ints(N), rows)
        jax.eval_shape(functools.partial(mixed, model), *device, DecodeInputs(ints(B), pages(B), ints()), prefill)
    kernels = {(op, problem) for op, problem in asked if op != "linear"}
    assert kernels == set(problems(cfg, config, buckets, 96, "int4", "float32"))
    assert {op for op, _ in kernels} == {"kv_write", "paged_attention", "quant_matmul", "sample_topk"}


def test_without_a_gpu_it_says_what_to_do():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/tune.py", "--model", "llama-8b"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "finds a CPU only: run it where" in done.stderr
    assert not done.stdout


def test_a_model_that_is_none_is_refused():
    with pytest.raises(ValueError, match="no such file or folder"):
        tune_command.model_config("/nowhere/at/all")
    assert tune_command.model_config("llama-8b").num_layers == 32


def test_a_table_that_cannot_be_written_is_known_before_anything_is_measured(tmp_path):
    file = tmp_path / "new" / "GPU.json"
    tune.check_table(file)
    assert not list(file.parent.iterdir())
    for text in ('{"kv_write": {', "[]"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"GPU\.json is .*: delete it"):
            tune.check_table(file)
    with pytest.raises(ValueError, match=r"cannot write .*; give another --out"):
        tune.check_table(file / "GPU.json")


def test_flags_are_those_of_serving():
    parser = argparse.ArgumentParser()
    tune_command.add_arguments(parser)
    args = parser.parse_args(["--model", "tiny", "--max-slots", "7", "--kv-dtype", "k=int8"])
    config = EngineConfig(**{name: getattr(args, name) for name in tune_command.FLAGS})
    assert config == EngineConfig(max_slots=7, kv_dtype="k=int8")
