"""Compiles one step of a Llama-3-8B-shaped model for a GPU that is not there, in a process of its own:

    python -m tests.gpu_compile.compile_step DEVICE WEIGHTS STEP FOLDER

DEVICE names a file of ``targets/``, WEIGHTS is bf16 or a format of ``quant_matmul``, STEP a key of ``STEPS``. Writes
``program.txt`` (the compiled HLO) and ``facts.json`` to FOLDER. Nothing is allocated: all arguments are abstract, on a
device of a topology that is described by the target file.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jaxsqueeze.bench import random_model
from jaxsqueeze.config import PREFILL_ROW, EngineConfig, KVDtypes
from jaxsqueeze.kv.pool import abstract_pool, storage
from jaxsqueeze.models.attention import GroupPages, QueryRows
from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.decoder import Decoder
from jaxsqueeze.quant.qtensor import QTensor
from jaxsqueeze.runner.sampling import sample
from jaxsqueeze.runner.state import SlotParams, SlotState, initial_state
from jaxsqueeze.runner.steps import SCORE_ROWS, DecodeInputs, PrefillInputs, decode_n, mixed
from pallas_kernels import dispatch
from pallas_kernels.resources import launches
from pallas_kernels.target import A100, H200

FOLDER = Path(__file__).parent
TARGETS = {"a100": A100, "h200": H200}
MODEL: ModelConfig = random_model.SHAPES["llama-8b"]
DTYPE = jnp.dtype(jnp.bfloat16)
SLOTS, ROWS, PAGES = 32, 8, 4097  # 4 GiB of K and of V
PREFILL_ROWS = EngineConfig.max_step_tokens // PREFILL_ROW
DRAFTS = 4
Shape = Callable[..., jax.ShapeDtypeStruct]


def decode_inputs(shape: Shape, rows: int = ROWS) -> DecodeInputs:
    return DecodeInputs(shape((rows,)), pages(shape, rows), shape(()))


def prefill_inputs(shape: Shape) -> PrefillInputs:
    n, q = PREFILL_ROWS, PREFILL_ROW
    return PrefillInputs(shape((n, q)), shape((n, q)), pages(shape, n), shape((n,)), shape((n,)), shape((n, q)))


def pages(shape: Shape, rows: int) -> tuple[GroupPages, ...]:
    return (GroupPages(shape((rows, MODEL.max_position // EngineConfig.page_size)), shape((rows,))),)


def verify(model: Decoder, variables, pool, state: SlotState, slot_params: SlotParams, inp: DecodeInputs, drafts_BK):
    """``DRAFTS`` drafted tokens of each row and one more position, sampled at each: what speculation will run."""
    n = DRAFTS + 1
    tokens_BN = jnp.concatenate([state.last_token[inp.slots][:, None], drafts_BK], axis=1)
    live = ~state.done[inp.slots]
    positions_BN = jnp.where(live[:, None], state.position[inp.slots][:, None] + jnp.arange(n), -1)
    hidden_TH, pool = model.apply(variables, tokens_BN.reshape(-1), pool, (QueryRows(positions_BN, inp.groups),))
    logits_TV = model.apply(variables, hidden_TH, method=Decoder.unembed)
    slots_T = jnp.repeat(inp.slots, n)
    positions_T = positions_BN.reshape(-1) + 1
    sampled, logprobs = sample(logits_TV, positions_T, slots_T, slot_params, state, target=model.target)
    sampled_BN = sampled.reshape(-1, n)
    accepted = jnp.cumprod(drafts_BK == sampled_BN[:, :-1], axis=1).sum(axis=1)
    state = state.replace(
        last_token=state.last_token.at[inp.slots].set(jnp.take_along_axis(sampled_BN, accepted[:, None], 1)[:, 0]),
        position=state.position.at[inp.slots].add(accepted + 1),
    )
    return pool, state, (sampled_BN, accepted, logprobs)


# Name -> the step, its inputs after the slot parameters, tokens that pass the layers, rows of logits at once.
STEPS: dict[str, tuple[Callable[..., Any], Callable[[Shape], tuple[Any, ...]], int, int]] = {
    "decode": (
        lambda model: functools.partial(decode_n, model, EngineConfig.decode_steps),
        lambda shape: (decode_inputs(shape),),
        ROWS,
        ROWS,
    ),
    "mixed": (
        lambda model: functools.partial(mixed, model),
        lambda shape: (decode_inputs(shape), prefill_inputs(shape)),
        ROWS + PREFILL_ROWS * PREFILL_ROW,
        max(ROWS + PREFILL_ROWS, SCORE_ROWS),
    ),
    "verify": (
        lambda model: functools.partial(verify, model),
        lambda shape: (decode_inputs(shape), shape((ROWS, DRAFTS))),
        ROWS * (DRAFTS + 1),
        ROWS * (DRAFTS + 1),
    ),
}


def topology_sharding(device: str) -> NamedSharding:
    """On the one device of the target, which need not exist."""
    text = (FOLDER / "targets" / f"{device}.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1")
    return NamedSharding(topologies.make_mesh(topology, (1,), ("device",)), PartitionSpec())


def expected_kernels(choices: set[tuple[str, Any, str, Any]]) -> dict[str, int]:
    """Launches of each op's Triton kernels in the program. A layer writes K and V, attends once for each kind of rows,
    and multiplies by four matrices of four shapes; sampling, and a matmul by the vocabulary, are there once."""
    in_layer = {"kv_write": 2, "paged_attention": 1, "quant_matmul": 1}
    count = Counter[str]()
    for op, problem, implementation, tile in choices:
        if implementation == "triton":
            once = op not in in_layer or (op == "quant_matmul" and problem.out == MODEL.vocab_size)
            times = 1 if once else in_layer[op] * MODEL.num_layers
            count[op] += times * len(launches(op, problem, dict(tile)))
    return dict(count)


def main(device: str, weights: str, step: str, folder: str) -> None:
    sharding = topology_sharding(device)

    def shape(dims: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda s: shape(s.shape, s.dtype), tree)

    params = placed(random_model.abstract(MODEL, DTYPE, None if weights == "bf16" else weights))
    pool = placed(abstract_pool(MODEL, (PAGES,), EngineConfig.page_size, storage(KVDtypes(), DTYPE, "cuda")))
    slot_params, state = placed(jax.eval_shape(lambda: initial_state(SLOTS, MODEL.vocab_size)))
    make, inputs, tokens, logit_rows = STEPS[step]
    model = Decoder(MODEL, DTYPE, MODEL.max_position, TARGETS[device])
    arguments = {"params": params, "views": {}}, pool, state, slot_params, *inputs(shape)

    choices = set()
    choose = dispatch.choose

    def recorded(op: str, problem: Any, *rest: Any) -> dispatch.Choice:
        choice = choose(op, problem, *rest)
        choices.add((op, problem, choice.implementation, tuple(choice.tile.items())))
        return choice

    dispatch.choose = recorded
    started = time.monotonic()
    lowered = jax.jit(make(model), donate_argnums=(1, 2)).lower(*arguments)
    traced = time.monotonic()
    compiled = lowered.compile()
    done = time.monotonic()

    memory = compiled.memory_analysis()
    facts = {
        "tokens": tokens,
        "logit_rows": logit_rows,
        "donated_bytes": [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((pool, state))],
        "parameter_shapes": sorted({x.shape for x in jax.tree.leaves(params)}),
        "smallest_weight": min(math.prod(x.shape) for x in matrices(params)),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "implementations": sorted({f"{op}: {implementation}" for op, _, implementation, _ in choices}),
        "kernels": expected_kernels(choices),
        "trace_seconds": traced - started,
        "compile_seconds": done - traced,
    }
    Path(folder, "program.txt").write_text(compiled.as_text())
    Path(folder, "facts.json").write_text(json.dumps(facts, indent=1))


def matrices(params: Any) -> list[jax.ShapeDtypeStruct]:
    """The weights as they are stored, without norms and scales."""
    weights = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QTensor))
    stored = [w.codes if isinstance(w, QTensor) else w for w in weights]
    return [w for w in stored if w.ndim > 1]


if __name__ == "__main__":
    main(*sys.argv[1:])
