"""Converted folders with quantised weights: codes are the nearest ones, everything else is as it was, bytes add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.manifest import read_manifest
from jaxsqueeze.checkpoint.source import SourceError
from jaxsqueeze.checkpoint.store import load_params
from jaxsqueeze.cli import main
from jaxsqueeze.quant import qtensor
from jaxsqueeze.quant.qtensor import QTensor
from jaxsqueeze.quant.scheme import Recipe, Scheme
from tests.checkpoint.build import flat
from tests.quant.rounding import nearest


@pytest.fixture(scope="module")
def folder(hf_checkpoint: Callable[..., Path]) -> Path:
    return hf_checkpoint(hidden_size=40, intermediate_size=72)  # no multiples of a group


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    out = tmp_path_factory.mktemp("plain") / "out"
    convert(HFFolder(folder), out, name="plain", dtype="float32")
    return {path: np.asarray(x) for path, x in flat(load_params(out))}


def matrix(weight: np.ndarray, group: int = 1) -> np.ndarray:
    """Outputs as one axis, inputs padded to whole bytes of whole groups."""
    rows = weight.reshape(-1, weight.shape[-1])
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % group)))


@pytest.mark.parametrize(
    ("recipe", "group", "bits"),
    [(Recipe("int8"), 0, 8), (Recipe("int4", 32, True), 32, 4), (Recipe("int2", 32, True), 32, 2)],
    ids=["int8", "int4", "int2"],
)
def test_codes_are_the_nearest(folder, plain, tmp_path, recipe, group, bits):
    manifest = convert(HFFolder(folder), tmp_path / "out", name="q", dtype="float32", recipe=recipe)
    assert read_manifest(tmp_path / "out") == manifest
    assert manifest.quantisation == str(recipe.scheme)
    params = dict(flat(load_params(tmp_path / "out")))
    assert set(params) == set(plain)
    quantised = {path for path, x in params.items() if isinstance(x, QTensor)}
    assert quantised == {path for path in plain if path.startswith("layers_") and path.endswith("/weight")}
    for path, x in params.items():
        if path not in quantised:
            np.testing.assert_array_equal(x, plain[path])
            continue
        assert x.shape == plain[path].shape
        padded = matrix(plain[path], group * 8 // bits if group else 1)
        right, step = nearest(padded, recipe.weights, group, recipe.zeros)
        width = plain[path].shape[-1]
        error = np.abs(np.asarray(x.dequantise(), np.float64).reshape(-1, width) - right[:, :width])
        # f32 arithmetic may fall on the other side of a tie: one code, where f64 is that close to one.
        assert np.mean(error > 1e-5 * step[:, :width]) < 2e-3
        assert np.all(error < 1.001 * step[:, :width])
        scales = 4 * len(padded) if not group else 2 * 2 * len(padded) * padded.shape[1] // group
        assert sum(a.nbytes for a in jax.tree.leaves(x)) == padded.size * bits // 8 + scales


def test_fp8_codes_are_within_half_a_step(folder, plain, tmp_path):
    """e4m3 has three bits after the point: a normal number is within a sixteenth of itself."""
    convert(HFFolder(folder), tmp_path / "out", name="q", recipe=Recipe("fp8"))
    params = dict(flat(load_params(tmp_path / "out")))
    path = "layers_0/mlp/down/weight"
    weight, found = plain[path], np.asarray(params[path].dequantise())
    largest = np.abs(weight).max(axis=1, keepdims=True)
    np.testing.assert_allclose(found.max(axis=1), weight.max(axis=1), rtol=1 / 16)
    assert np.all(np.abs(found - weight) <= np.maximum(np.abs(weight) / 16, largest / 448 * 2.0**-10) * (1 + 1e-6))


def test_patterns_choose_weights(folder, tmp_path):
    recipe = Recipe("int8", keep=("layers_0/*",), also=("embed/weight", "lm_head/weight"))
    manifest = convert(HFFolder(folder), tmp_path / "out", name="q", recipe=recipe)
    assert not any(path.startswith("layers_0/") for path in manifest.schemes)
    assert {"embed/weight", "lm_head/weight", "layers_1/attn/o/weight"} <= set(manifest.schemes)
    with pytest.raises(SourceError, match="no weight matches 'layers_9/"):
        convert(HFFolder(folder), tmp_path / "other", name="q", recipe=Recipe("int8", keep=("layers_9/*",)))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("scheme", [Scheme("int8"), Scheme("int4", 32, True, "float16"), Scheme("fp8")], ids=str)
def test_rows_are_looked_up(scheme):
    weight = np.random.default_rng(0).normal(size=(50, 70)).astype(np.float32)
    table = qtensor.quantise(jnp.asarray(weight), scheme)
    rows = jnp.array([3, 0, 49, 60, 3])
    np.testing.assert_array_equal(table.take(rows), np.asarray(table.dequantise())[[3, 0, 49, 49, 3]])


@pytest.mark.parametrize("scheme", [Scheme("int8"), Scheme("int2", 32, True, "float16")], ids=str)
def test_pieces_give_what_the_whole_gives(scheme, monkeypatch):
    weight = np.random.default_rng(0).normal(size=(7, 3, 70)).astype(np.float32)
    whole = qtensor.quantise(jnp.asarray(weight), scheme)
    monkeypatch.setattr(qtensor, "_BLOCK", 5 * 70)
    pieces = qtensor.quantise_on_host(weight, scheme)
    assert jax.tree.structure(pieces) == jax.tree.structure(whole)
    jax.tree.map(np.testing.assert_array_equal, pieces, whole)


def test_scales_of_another_shape_are_damage(folder, tmp_path):
    convert(HFFolder(folder), tmp_path / "out", name="q", recipe=Recipe("int4", 32))
    file = tmp_path / "out" / "manifest.json"
    data = json.loads(file.read_text())
    for fields in data["schemes"].values():
        fields["group"] = 64
    file.write_text(json.dumps(data))
    with pytest.raises(SourceError, match="convert again"):
        load_params(tmp_path / "out")
    data["schemes"]["layers_0/attn/o/weight"]["bits"] = 4
    file.write_text(json.dumps(data))
    with pytest.raises(SourceError, match=r"manifest\.json: damaged"):
        read_manifest(tmp_path / "out")


def test_a_judge_sees_the_whole_folder_and_its_report_is_stored(folder, tmp_path):
    recipe, raised = Recipe("int4", 32), {"layers_0/attn/o/weight": Scheme("int8")}
    seen = {}

    def judge(partial):
        seen["params"], seen["manifest"], seen["out"] = load_params(partial), read_manifest(partial), out.exists()
        return {"all": {"kl_max": 0.5}, "rare": {"flips": None}}

    out = tmp_path / "out"
    manifest = convert(HFFolder(folder), out, name="q", recipe=recipe, raised=raised, judge=judge)
    assert manifest.quality == {"all": {"kl_max": 0.5}, "rare": {"flips": None}}
    assert read_manifest(out) == manifest
    assert (seen["manifest"].quality, seen["out"]) == (None, False)
    assert manifest.schemes["layers_0/attn/o/weight"] == Scheme("int8")
    assert manifest.quantisation == "int4-g32, 1 of 8 weights int8"
    jax.tree.map(np.testing.assert_array_equal, seen["params"], load_params(out))

    def refuse(partial):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        convert(HFFolder(folder), out, name="other", recipe=recipe, judge=refuse, force=True)
    assert read_manifest(out) == manifest
    with pytest.raises(RuntimeError, match="no"):
        convert(HFFolder(folder), tmp_path / "deep" / "out", name="other", recipe=recipe, judge=refuse)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_the_command(folder, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["convert", str(folder), out, "--weights", "int8", "--zero-points"]) == 2
    assert capsys.readouterr().err == "error: zero points are for int4 and int2 weights, not for int8\n"
    assert main(["convert", str(folder), out, "--weights", "int2"]) == 2
    assert "int2 weights must be calibrated" in capsys.readouterr().err
    assert not Path(out).exists()
    assert main(["convert", str(folder), out, "--weights", "int4", "--keep", "*/nothing"]) == 2
    assert "no weight matches '*/nothing'" in capsys.readouterr().err
    assert main(["convert", str(folder), out, "--weights", "int4", "--group-size", "32", "--keep", "*/o/weight"]) == 0
    schemes = read_manifest(Path(out)).schemes
    assert set(map(str, schemes.values())) == {"int4-g32"}
    assert "layers_0/attn/o/weight" not in schemes
