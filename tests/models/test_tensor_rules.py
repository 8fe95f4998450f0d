"""Checkpoint tensors to parameters, each rule against plain indexing."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxsqueeze.models import families
from jaxsqueeze.models.families import rules

GOLDEN = Path(__file__).parents[1] / "golden"


def checkpoint(name: str):
    cfg = families.config_from_hf(json.loads((GOLDEN / name / "config.json").read_text()))
    return cfg, load_file(GOLDEN / name / "model.safetensors")


@pytest.mark.parametrize("leaf", ["weight", "bias"])
def test_qkv_puts_each_kv_heads_queries_first(leaf):
    cfg, tensors = checkpoint("llama_linear")
    d, g = cfg.head_dim, cfg.q_per_kv
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.{leaf}"] for x in "qkv")
    ours = rules.apply(rules.QKV, cfg, [q, k, v])
    assert ours.shape[:3] == (2, 5, 8)
    for head in range(cfg.num_heads):
        np.testing.assert_array_equal(ours[head // g, head % g], q[head * d : (head + 1) * d])
    for head in range(cfg.num_kv_heads):
        np.testing.assert_array_equal(ours[head, g], k[head * d : (head + 1) * d])
        np.testing.assert_array_equal(ours[head, g + 1], v[head * d : (head + 1) * d])


def test_fused_projections_are_split_at_the_right_rows():
    cfg, tensors = checkpoint("phi3_long")
    fused = tensors["model.layers.0.self_attn.qkv_proj.weight"]
    q, k, v = fused[:60], fused[60:80], fused[80:]
    np.testing.assert_array_equal(rules.apply(rules.QKV_FUSED, cfg, [fused]), rules.apply(rules.QKV, cfg, [q, k, v]))
    both = tensors["model.layers.0.mlp.gate_up_proj.weight"]
    gate, up = rules.apply(rules.HALVES, cfg, [both])
    np.testing.assert_array_equal(gate, both[:44])
    np.testing.assert_array_equal(up, both[44:])


def test_gemma_norms_gain_one_in_float32():
    cfg, _ = checkpoint("gemma3")
    plan = families.tensor_plan(cfg)
    norms = {path for path in plan if path.endswith("scale")}
    assert len(norms) == 6 * cfg.num_layers + 1
    assert {plan[path].rule for path in norms} == {rules.NORM_PLUS_ONE}
    stored = np.array([0, 0.00390625, -1], ml_dtypes.bfloat16)  # 1 + 2**-8 is no bfloat16 number
    effective = rules.apply(rules.NORM_PLUS_ONE, cfg, [stored])
    assert effective.dtype == np.float32
    np.testing.assert_array_equal(effective, [1, 1.00390625, 0])


@pytest.mark.parametrize("rule", [rules.QKV, rules.STACK])
def test_bfloat16_bits_are_kept(rule):
    cfg, _ = checkpoint("llama")
    path = {rules.QKV: "layers_0/attn/qkv/weight", rules.STACK: "layers_0/mlp/gate_up/weight"}[rule]
    rng = np.random.default_rng(0)
    sources = [rng.normal(size=s).astype(ml_dtypes.bfloat16) for s in rules.rule_shapes(rule, cfg, path)]
    out = rules.apply(rule, cfg, sources)
    assert out.dtype == ml_dtypes.bfloat16
    bits = np.sort(np.concatenate([s.view(np.uint16).ravel() for s in sources]))
    np.testing.assert_array_equal(np.sort(out.view(np.uint16).ravel()), bits)


@pytest.mark.parametrize("name", sorted(p.parent.name for p in GOLDEN.glob("*/config.json")))
def test_plan_uses_every_tensor_of_the_checkpoint_once(name):
    cfg, tensors = checkpoint(name)
    used = [source for rule in families.tensor_plan(cfg).values() for source in rule.sources]
    assert sorted(used) == sorted(tensors)


def test_tied_plan_ignores_a_head_and_untied_plan_demands_one():
    tied, _ = checkpoint("qwen2")
    assert tied.tie_embeddings
    assert "lm_head" not in families.units(tied)
    assert not any("lm_head" in s for rule in families.tensor_plan(tied).values() for s in rule.sources)
    untied, _ = checkpoint("llama")
    assert families.units(untied) == ["embed", "layers_0", "layers_1", "layers_2", "final_norm", "lm_head"]
    assert families.tensor_plan(untied)["lm_head/weight"].sources == ("lm_head.weight",)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.up_proj.weight",
        "language_model.model.layers.3.mlp.up_proj.weight",
        "model.language_model.layers.3.mlp.up_proj.weight",
    ],
)
def test_multimodal_prefixes(name):
    assert families.canonical_name(name) == "model.layers.3.mlp.up_proj.weight"


def test_other_names_are_left_alone():
    assert families.canonical_name("lm_head.weight") == "lm_head.weight"
    assert families.canonical_name("language_model.lm_head.weight") == "lm_head.weight"
    assert families.canonical_name("vision_tower.layers.0.weight") == "vision_tower.layers.0.weight"
