"""GPTQ checkpoints keep their codes: v1 and v2 zero points, symmetric or not, any order of inputs."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.manifest import read_manifest
from jaxsqueeze.checkpoint.source import SourceError
from jaxsqueeze.cli import main
from jaxsqueeze.quant.scheme import STORED, Recipe
from tests.checkpoint.quantised_build import CONFIG, Layer, check_logits, check_stored, edit, pack, write


def settings(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, **more}


def layer(config: dict[str, Any], out: int, width: int, seed: int, *, order_seed: int, bias: bool = True) -> Layer:
    """qweight, qzeros, scales, g_idx; zero points of v1 reach 16, one more than a code."""
    rng = np.random.default_rng(seed)
    bits, size = config["bits"], config["group_size"] if config["group_size"] > 0 else width
    groups, top, v1 = -(-width // size), 2**bits - 1, config.get("checkpoint_format") != "gptq_v2"
    codes = rng.integers(0, top + 1, (width, out))
    zeros = (
        rng.integers(int(v1), top + 1 + v1, (groups, out))
        if not config["sym"]
        else np.full((groups, out), top // 2 + 1)
    )
    scales = rng.uniform(0.01, 0.02, (groups, out)).astype(config.get("scale_dtype", "float16"))
    index = np.arange(width, dtype=np.int32) // size
    if config["desc_act"]:
        np.random.default_rng(order_seed).shuffle(index)
    tensors = {
        "qweight": pack(codes.T, bits).T,
        "qzeros": pack(zeros - v1, bits),
        "scales": scales,
        "g_idx": index,
    }
    if bias:  # as AutoGPTQ writes them for models that have none
        tensors["bias"] = np.zeros(out, np.float16)
    return tensors, ((codes - zeros[index]) * scales.astype(np.float64)[index]).T


def build(folder: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    seeds = iter(range(1, 100))

    def made(module: str, out: int, width: int) -> Layer:
        # q, k and v see the same inputs, hence they have one order; so do gate and up.
        order = zlib.crc32(f"{module.rpartition('.')[0]} {module.split('.')[-1][0] in 'od'}".encode())
        return layer(config, out, width, next(seeds), order_seed=order)

    return write(folder, config, made)


CASES = {
    "v1": (settings(), {"int4-g32-zeros"}),
    "v2": (settings(checkpoint_format="gptq_v2"), {"int4-g32-zeros"}),
    "symmetric": (settings(sym=True), {"int4-g32"}),
    "in activation order": (settings(desc_act=True), {"int4-g32-zeros ordered"}),
    "symmetric, in activation order": (
        settings(desc_act=True, sym=True, group_size=64),
        {"int4-g64 ordered", "int4-g64"},
    ),
    "one group": (
        settings(group_size=-1, desc_act=True, scale_dtype="bfloat16"),
        {"int4-g64-zeros", "int4-g128-zeros"},
    ),
    "8 bits": (settings(bits=8, scale_dtype="float32"), {"int8-g32-zeros"}),
    "8 bits, symmetric, one group": (settings(bits=8, sym=True, group_size=-1), {"int8"}),
    "2 bits": (settings(bits=2, group_size=64), {"int2-g64-zeros"}),
}


@pytest.mark.parametrize("case", CASES)
def test_codes_are_kept(tmp_path, case):
    config, schemes = CASES[case]
    weights = build(tmp_path / "in", config)
    words, found = check_stored(HFFolder(tmp_path / "in"), tmp_path, weights)
    assert found == schemes
    assert set(words.split(", ")) == {f"gptq {scheme.removesuffix(' ordered')}" for scheme in schemes}
    if case == "in activation order":
        check_logits(tmp_path / "stored", CONFIG, weights)


def test_groups_that_are_not_ours_are_expanded(tmp_path):
    weights = build(tmp_path / "in", settings(group_size=16, desc_act=True))
    for name, right in weights.items():
        np.testing.assert_array_equal(
            HFFolder(tmp_path / "in").get(name, np.dtype(np.float32)), right.astype(np.float32)
        )
    assert HFFolder(tmp_path / "in").scheme("model.layers.0.mlp.up_proj.weight") is None


def test_kept_wide_and_requantised(tmp_path):
    build(tmp_path / "in", settings())
    source = HFFolder(tmp_path / "in")
    kept = convert(source, tmp_path / "a", name="x", recipe=Recipe(STORED, keep=("layers_0/*", "*/down/weight")))
    assert set(kept.schemes) == {f"layers_1/{x}/weight" for x in ("attn/qkv", "attn/o", "mlp/gate_up")}
    again = convert(source, tmp_path / "b", name="x", recipe=Recipe("int8"))
    assert {str(scheme) for scheme in again.schemes.values()} == {"int8"}


def test_the_command_keeps_them_by_default(tmp_path):
    build(tmp_path / "in", settings())
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert read_manifest(tmp_path / "out").quantisation == "gptq int4-g32-zeros"
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "wide"), "--weights", "bf16"]) == 0
    assert read_manifest(tmp_path / "wide").schemes == {}


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "3 bits are not supported"),
        ({"bits": "four"}, "bits = 'four'"),
        ({"checkpoint_format": "marlin"}, "format 'marlin' is not supported"),
        ({"dynamic": {r"+:.*down.*": {"bits": 8}}}, "differ by layer"),
        ({"group_size": 64}, r"asks for \[3, 96\]"),
        ({"sym": True}, "zero points of .* are not 8"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, change, message):
    config = settings()
    build(tmp_path / "in", config)
    file = tmp_path / "in" / "config.json"
    file.write_text(json.dumps({**CONFIG, "quantization_config": {**config, **change}}))
    refused(tmp_path, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q}.scales"), f"tensor '{Q}.scales' is missing"),
        (lambda t: t.pop(f"{Q}.qweight"), f"tensor '{Q}.weight' is missing"),
        (lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:2]}), "asks for"),
        (lambda t: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"].astype(np.int64)}), "is stored as I64"),
        (lambda t: t.update({f"{Q}.g_idx": t[f"{Q}.g_idx"] + 1}), "groups that are not there"),
        (lambda t: t.update({f"{Q}.g_idx": t[f"{Q}.g_idx"] * 0}), "do not fill groups of 32"),
        (lambda t: t.update({f"{Q}.g_idx": np.roll(t[f"{Q}.g_idx"], 3)}), "in different orders"),
        (lambda t: t.update({f"{Q}.bias": t[f"{Q}.bias"] + 1}), f"tensor '{Q}.bias' has no place"),
    ],
)
def test_damage_is_one_sentence(tmp_path, change, message):
    build(tmp_path / "in", settings(desc_act=True))
    edit(tmp_path / "in", change)
    refused(tmp_path, message)


def test_an_order_that_is_not_announced(tmp_path):
    build(tmp_path / "in", settings(desc_act=True))
    file = tmp_path / "in" / "config.json"
    file.write_text(json.dumps({**CONFIG, "quantization_config": settings()}))
    refused(tmp_path, "order of their own although")


def refused(tmp_path: Path, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        convert(HFFolder(tmp_path / "in"), tmp_path / "out", name="x", recipe=Recipe(STORED))
    assert str(caught.value).startswith(str(tmp_path / "in"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
