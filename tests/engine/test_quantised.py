"""Engines with quantised weights or KV answer as the dense model with the weights that the codes stand for."""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
import pytest

from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.config import EngineConfig
from jaxsqueeze.engine import Engine
from jaxsqueeze.quant.scheme import Recipe
from tests.checkpoint.build import read_tensors
from tests.engine.conftest import EOS_IDS, OPTIONS
from tests.engine.dense_oracle import DenseOracle
from tests.engine.traffic import alone, among_others, random_ids, request
from tests.quant.rounding import nearest

PROMPT = random_ids(5, 40)
# Weights, KV, and the most that a log-probability may be off: exact but for f32 rounding; keys and values in
# int8 are off by up to 1/254 of the largest, in int4 by 1/14.
CASES = {
    "int4": (Recipe("int4", 32, True), "auto", 1e-3),
    "int8": (Recipe("int8"), "auto", 1e-3),
    "int8 KV": (Recipe(), "int8", 0.05),
    "int8 K, int4 V": (Recipe("int4", 32, True), "k=int8,v=int4", 0.5),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, checkpoint, tmp_path_factory):
    """(engine, oracle, bound)"""
    recipe, kv_dtype, bound = CASES[request.param]
    out = tmp_path_factory.mktemp("quantised") / "model"
    convert(HFFolder(checkpoint), out, name="quantised", dtype="float32", recipe=recipe)
    with pytest.MonkeyPatch.context() as patch:
        options = {"xla_backend_optimization_level": 0}
        quick = functools.partialmethod(jax.stages.Lowered.compile, compiler_options=options)
        patch.setattr(jax.stages.Lowered, "compile", quick)
        config = EngineConfig(model=str(out), kv_dtype=kv_dtype, kv_bytes=60_000, **OPTIONS)
        engine = Engine(config)
        engine.warm_up()
    tensors = read_tensors(checkpoint)
    if recipe.scheme is not None:
        for name, weight in tensors.items():
            if name.endswith("_proj.weight"):
                group = recipe.group if recipe.zeros else 0
                padded = np.pad(weight, ((0, 0), (0, -weight.shape[1] % (2 * group or 1))))
                tensors[name] = nearest(padded, recipe.weights, group, recipe.zeros)[0][:, : weight.shape[1]]
    hf = json.loads((checkpoint / "config.json").read_text())
    return engine, DenseOracle(hf, tensors, EOS_IDS), bound


def test_logprobs_are_those_of_the_codes(case):
    engine, oracle, bound = case
    (a,) = alone(engine, [request(PROMPT, max_tokens=12, temperature=0, logprobs=1, ignore_eos=True)])
    right = oracle.log_softmax([*PROMPT, *a.tokens])[len(PROMPT) - 1 : -1]
    found = [x.logprob for x in a.logprobs]
    assert np.abs(found - right[np.arange(12), a.tokens]).max() < bound


def test_neighbours_and_preemption_change_nothing(case):
    engine, _, _ = case
    wanted = request(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
    (first,), (second,) = alone(engine, [wanted]), among_others(engine, [wanted])
    assert first.tokens == second.tokens


def test_the_ledger_counts_the_stored_bytes(case):
    """And the bytes are those of codes: int8 with a scale for each of 8 values is 12 bytes, float32 is 32."""
    engine, _, _ = case
    ledger, runner = engine.ledger, engine._runner
    per_head = {"auto": 64, "int8": 24, "k=int8,v=int4": 12 + 8}[engine.config.kv_dtype]
    pages = sum(g.pages + 1 for g in ledger.groups)
    assert ledger.kv_bytes == pages * 2 * OPTIONS["page_size"] * per_head
    assert ledger.weight_bytes == sum(x.nbytes for x in jax.tree.leaves(runner._variables["params"]))
    assert ledger.kv_bytes == sum(x.nbytes for x in jax.tree.leaves(runner._pool))
