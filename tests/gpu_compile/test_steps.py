"""The whole decode, mixed and verify steps of a Llama-3-8B-shaped model, compiled for an A100 and an H200 without one:
what the compiled program shows of memory and kernels.

Needs jax's CUDA plug-in, in an environment of its own (see .ci/run); ``pytest -m gpu_compile`` runs it.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.gpu_compile import process
from tests.gpu_compile.program import HANDS_ON, Instruction, aliased_outputs, instructions, launched_singly

pytestmark = [pytest.mark.gpu_compile, pytest.mark.timeout(900)]
LAYERS, HIDDEN, WIDTH, QKV, VOCAB = 32, 4096, 14336, 48 * 128, 128256
STEPS = ("decode", "mixed", "verify")
CASES = [("h200", weights, step) for weights in ("bf16", "int8", "int4") for step in STEPS]
CASES += [("a100", "bf16", "decode"), ("a100", "int4", "decode"), ("a100", "int8", "mixed"), ("a100", "int4", "verify")]


class Step(NamedTuple):
    weights: str
    facts: dict[str, Any]
    hlo: str
    instructions: list[Instruction]
    thunks: str

    def kernels(self) -> dict[str, int]:
        """Calls of Triton kernels by op."""
        calls = [i for i in self.instructions if i.opcode == "custom-call" and "triton_kernel_call" in i.text]
        return dict(Counter(op for i in calls for op in self.facts["kernels"] if f"/{op}/" in i.scope))


@functools.cache
def compiled(device: str, weights: str, step: str) -> Step:
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder}/dump --xla_dump_hlo_as_text"
        process.run("compile_step", device, weights, step, folder, XLA_FLAGS=flags)
        facts = json.loads(Path(folder, "facts.json").read_text())
        hlo = Path(folder, "program.txt").read_text()
        (thunks,) = Path(folder, "dump").glob(f"*.{hlo.split()[1][:-1]}.*after_thunk_passes.txt")
        seconds = f"traced in {facts['trace_seconds']:.0f} s, compiled in {facts['compile_seconds']:.0f} s"
        print(f"{device} {weights} {step}: {seconds}")
        return Step(weights, facts, hlo, instructions(hlo), thunks.read_text())


@pytest.fixture(params=CASES, ids="-".join, scope="module")
def step(request: pytest.FixtureRequest) -> Step:
    return compiled(*request.param)


def test_pool_and_state_are_updated_in_place(step):
    donated = step.facts["donated_bytes"]
    assert aliased_outputs(step.hlo) == len(donated)
    assert step.facts["alias_bytes"] == sum(donated)


def test_temporary_memory_is_a_few_logits_and_the_activations_of_a_layer(step):
    logits = 4 * step.facts["logit_rows"] * VOCAB
    activations = 4 * step.facts["tokens"] * (2 * WIDTH + QKV + 2 * HIDDEN)
    assert step.facts["temp_bytes"] < 5 * logits + activations


def test_no_instruction_writes_an_array_of_the_size_of_a_weight_or_a_layer_of_the_pool(step):
    large = step.facts["smallest_weight"]
    written = [i for i in step.instructions if i.opcode not in HANDS_ON and i.largest >= large]
    assert [i.text[:300] for i in written if not (i.in_place and "/kv_write/" in i.scope)] == []
    assert len(written) == 2 * LAYERS, "K and V of each layer are written, in place"


def test_no_parameter_is_copied_or_transposed(step):
    shapes = {tuple(sorted(s)) for s in step.facts["parameter_shapes"] if len(s) > 1}
    moved = [i for i in step.instructions if i.opcode in ("copy", "copy-start", "transpose")]
    assert [i.text[:300] for i in moved if any(tuple(sorted(s)) in shapes for s in i.shapes)] == []


def test_our_kernels_run(step):
    wanted = {"kv_write", "paged_attention", "sample_topk"} | ({"quant_matmul"} if step.weights != "bf16" else set())
    assert step.facts["kernels"].keys() == wanted
    assert step.kernels() == step.facts["kernels"]


def test_kernels_of_the_layers_are_in_command_buffers(step):
    assert launched_singly(step.thunks) < LAYERS
