"""Scales of a matmul's inputs, moved into what makes them, change nothing that a layer computes."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jaxsqueeze.checkpoint.assemble import Job, build, prepare
from jaxsqueeze.checkpoint.calibration.fold import MAKERS, fold, shared
from jaxsqueeze.checkpoint.calibration.forward import advance
from jaxsqueeze.checkpoint.calibration.text import ROWS
from jaxsqueeze.checkpoint.hf import HFFolder


def layer(job: Job, unit: str) -> dict[str, jnp.ndarray]:
    return {p.removeprefix(f"{unit}/"): jnp.asarray(build(job, p, np.dtype(np.float32))) for p in job.paths(unit)}


def outputs(job: Job, params: dict[str, jnp.ndarray]) -> np.ndarray:
    hidden = np.random.default_rng(2).normal(size=(ROWS, 20, job.config.hidden_size)).astype(np.float32)
    before = hidden.copy()
    advance(job.config, job.config.layers[0], unflatten_dict(params, sep="/"), hidden, lambda: None)
    return hidden - before


# Llama's with biases everywhere; Gemma's with norms of q, k and of the outputs.
@pytest.mark.parametrize("name", ["llama_linear", "qwen2", "gemma3"])
def test_the_layer_computes_what_it_did(golden: Path, name: str) -> None:
    job = prepare(HFFolder(golden / name))
    params = layer(job, "layers_0")
    right = outputs(job, params)
    rng = np.random.default_rng(3)
    folded = params
    for matmul in MAKERS:
        width = params[f"{matmul}/weight"].shape[-1]
        scales = jnp.exp(shared(job.config, matmul, jnp.asarray(rng.normal(size=width), jnp.float32)))
        assert np.std(scales) > 0.1
        folded = fold(job.config, folded, matmul, scales)
        one = fold(job.config, params, matmul, scales)
        for each in (folded, one):
            found = outputs(job, each)
            assert np.linalg.norm(found - right) < 2e-6 * np.linalg.norm(right)
            assert np.abs(found - right).max() < 1e-5 * np.abs(right).max()
    changed = {path for path, x in folded.items() if not np.array_equal(x, params[path])}
    matmuls = {f"{m}/weight" for m in MAKERS}
    biases = {p for p in ("attn/qkv/bias", "mlp/gate_up/bias") if p in params}
    assert changed == matmuls | biases | {"input_norm/scale", "mlp_norm/scale"}
    if biases:  # q, k and the gate keep theirs
        np.testing.assert_array_equal(folded["attn/qkv/bias"][:, :-1], params["attn/qkv/bias"][:, :-1])


def test_scales_of_one_kv_heads_queries_are_equal(golden: Path) -> None:
    cfg = prepare(HFFolder(golden / "llama")).config  # 6 heads of 8, 2 KV heads
    found = np.asarray(shared(cfg, "attn/o", jnp.arange(48.0))).reshape(2, 3, 8)
    np.testing.assert_allclose(found[1], np.broadcast_to(np.arange(24.0, 48.0).reshape(3, 8).mean(0), (3, 8)))
    np.testing.assert_array_equal(shared(cfg, "attn/qkv", jnp.arange(36.0)), np.arange(36.0))
