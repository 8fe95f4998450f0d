"""The gate of ``convert``: what passes, what is refused and what is left then; weights' costs against whole runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from jaxsqueeze.checkpoint import convert as converting
from jaxsqueeze.checkpoint.calibration.text import Calibration
from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.manifest import read_manifest
from jaxsqueeze.checkpoint.source import SourceError
from jaxsqueeze.checkpoint.store import load_params
from jaxsqueeze.cli import main
from jaxsqueeze.config import KVDtypes
from jaxsqueeze.models.families import config_from_hf, rules
from jaxsqueeze.quant import qtensor
from jaxsqueeze.quant.scheme import Recipe, Scheme
from jaxsqueeze.report.quality import render
from jaxsqueeze.report.quality.evaluate import Settings, evaluate, read_text
from jaxsqueeze.report.quality.gate import Limits, Refused, convert_within
from jaxsqueeze.report.quality.sensitivity import WeightCost, weight_costs
from tests.checkpoint.build import TINY_CONFIG, read_tensors
from tests.engine.conftest import HF
from tests.engine.dense_oracle import DenseOracle
from tests.quant.rounding import nearest

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
TOKENS = 64
GROUP = 32
CONFIG = {
    **HF,
    "layer_types": ["full_attention"] * 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 8,
}
FRAGILE = "layers_1/mlp/gate_up/weight"

# The checkpoint's tensors in each weight.
PARTS = {
    "attn/qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn/o": ("self_attn.o_proj",),
    "mlp/gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp/down": ("mlp.down_proj",),
}
TENSORS = {
    **{
        f"layers_{i}/{part}/weight": tuple(f"model.layers.{i}.{name}.weight" for name in names)
        for i in (0, 1)
        for part, names in PARTS.items()
    },
    "embed/weight": ("model.embed_tokens.weight",),
    "lm_head/weight": ("lm_head.weight",),
}


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    """References are converted into a cache of this module's own; programs are compiled for speed of compiling."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSQUEEZE_CACHE", str(tmp_path_factory.mktemp("cache")))
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def checkpoint(hf_checkpoint) -> Path:
    """A model that is sure of some tokens. In each group of inputs of the second layer's MLP one channel is small and
    its weights large, which changes nothing until a group has only 16 codes: then the other weights are lost."""
    folder = hf_checkpoint(**CONFIG)
    tensors = read_tensors(folder)
    tensors["lm_head.weight"] *= 12
    tensors["model.layers.1.post_attention_layernorm.weight"][::GROUP] /= 100
    for name in PARTS["mlp/gate_up"]:
        tensors[f"model.layers.1.{name}.weight"][:, ::GROUP] *= 100
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def plain(checkpoint, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("gate") / "plain"
    convert(HFFolder(checkpoint), out, name="plain", dtype="float32")
    return out


@pytest.fixture
def text(tmp_path) -> Path:
    file = tmp_path / "text"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def quantised(checkpoint, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("gate") / "int4"
    recipe = Recipe("int4", GROUP, True, also=("embed/weight", "lm_head/weight"))
    convert(HFFolder(checkpoint), out, name="int4", dtype="float32", recipe=recipe)
    return out


def test_costs_are_those_of_dense_models_with_one_weight_rounded(checkpoint, plain, quantised):
    hf, tensors = json.loads((checkpoint / "config.json").read_text()), read_tensors(checkpoint)
    window = read_text(plain, TEXT, Settings((TOKENS,), TOKENS - 1, KVDtypes()))[1][0]
    ref = DenseOracle(hf, tensors).log_softmax(window)
    expected = {}
    for path, names in TENSORS.items():
        rounded = dict(tensors)
        for name in names:
            weight = tensors[name]
            padded = np.pad(weight, ((0, 0), (0, -weight.shape[1] % (2 * GROUP))))
            rounded[name] = nearest(padded, "int4", GROUP, True)[0][:, : weight.shape[1]]
        kl = (np.exp(ref) * (ref - DenseOracle(hf, rounded).log_softmax(window))).sum(axis=1)
        expected[path] = kl.mean(), np.quantile(kl, 0.99)

    bars = []
    costs = weight_costs(quantised, plain, window, False, lambda *bar: bars.append(bar))
    assert {cost.name for cost in costs} == set(expected)
    for cost in costs:
        assert (cost.kl_mean, cost.kl_p99) == pytest.approx(expected[cost.name], rel=0.05, abs=1e-5)
    assert [cost.kl_mean for cost in costs] == sorted((cost.kl_mean for cost in costs), reverse=True)
    assert (costs[0].name, costs[0].paths) == (FRAGILE, (FRAGILE,))
    assert bars[-1] == ("each weight", 10, 10)
    config = read_manifest(plain).config
    assert costs[0].num_bytes == narrow_bytes(2 * config.intermediate_size, config.hidden_size)
    assert render.costs_table(costs, 3).row_count == 3


def narrow_bytes(out: int, width: int) -> int:
    """Of an int4 weight: whole bytes of whole groups, a scale and a zero for each."""
    padded = -(-width // (2 * GROUP)) * 2 * GROUP
    return out * (padded // 2 + 2 * 2 * padded // GROUP)


def test_costs_of_calibrated_weights_are_those_of_what_was_scaled_together(checkpoint, plain, tmp_path):
    """Calibration moves scales between weights and into norms: an attention or MLP is replaced whole."""
    (tmp_path / "text").write_text("Sphinx of black quartz, judge my vow. " * 60)
    recipe, folder = Recipe("int4", GROUP, True, also=("embed/weight",)), tmp_path / "calibrated"
    calibration = Calibration(tmp_path / "text", 2048)
    convert(HFFolder(checkpoint), folder, name="", dtype="float32", recipe=recipe, calibration=calibration)
    hf, tensors = json.loads((checkpoint / "config.json").read_text()), read_tensors(checkpoint)
    window = read_text(plain, TEXT, Settings((TOKENS,), TOKENS - 1, KVDtypes()))[1][0]
    ref = DenseOracle(hf, tensors).log_softmax(window)
    params = flatten_dict(load_params(folder), sep="/")
    costs = weight_costs(folder, plain, window, True)
    assert {cost.name for cost in costs} == {
        "embed/weight",
        *(f"layers_{i}/{x}" for i in (0, 1) for x in ("attn", "mlp")),
    }
    moved = []
    for cost in costs:
        if cost.name == "embed/weight":
            assert cost.paths == ("embed/weight",)
            continue
        layer, part = cost.name.split("/")
        assert cost.paths == tuple(f"{layer}/{name}/weight" for name in PARTS if name.startswith(part))
        prefix, norm = f"model.layers.{layer[-1]}.", {"attn": "input_norm", "mlp": "mlp_norm"}[part]
        other = {"attn": "input_layernorm", "mlp": "post_attention_layernorm"}[part]
        changed = {**tensors, f"{prefix}{other}.weight": np.asarray(params[f"{layer}/{norm}/scale"])}
        for path in cost.paths:
            weight = np.asarray(params[path].dequantise())
            names = PARTS[path.removeprefix(f"{layer}/").removesuffix("/weight")]
            if len(names) == 3:  # [kv heads, query heads, k, v of each]
                pieces = [weight[:, :-2], weight[:, -2], weight[:, -1]]
            else:
                pieces = list(weight) if len(names) == 2 else [weight]
            for name, piece in zip(names, pieces, strict=True):
                changed[f"{prefix}{name}.weight"] = piece.reshape(tensors[f"{prefix}{name}.weight"].shape)
        moved.append(np.abs(changed[f"{prefix}{other}.weight"] / tensors[f"{prefix}{other}.weight"] - 1).max())
        kl = (np.exp(ref) * (ref - DenseOracle(hf, changed).log_softmax(window))).sum(axis=1)
        assert (cost.kl_mean, cost.kl_p99) == pytest.approx((kl.mean(), np.quantile(kl, 0.99)), rel=0.05, abs=1e-5)
    assert max(moved) > 0.1


def command(checkpoint: Path, out: Path, text: Path, *more: object) -> int:
    flags = [
        "--dtype",
        "float32",
        "--weights",
        "int4",
        "--group-size",
        GROUP,
        "--zero-points",
        "--text",
        text,
        "--max-tokens",
        TOKENS,
    ]
    return main(["convert", *map(str, [checkpoint, out, *flags, *more])])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_report_is_stored(checkpoint, plain, text, tmp_path, capsys):
    out = tmp_path / "out"
    assert command(checkpoint, out, text) == 0
    manifest = read_manifest(out)
    settings = Settings((512,), TOKENS, KVDtypes())
    whole = evaluate(out, plain, TEXT, settings, None)
    assert manifest.quality["all"] == pytest.approx(whole["all"], rel=1e-4, abs=1e-6)
    assert manifest.quality["rare"]["flips"] == whole["rare"]["flips"]
    assert manifest.quality["by_rarity"].keys() == whole["by_rarity"].keys()
    assert manifest.quality["tokens"] == whole["tokens"]
    assert json.loads((tmp_path / "out.report" / "report.json").read_text()) == manifest.quality
    assert (tmp_path / "out.report" / "report.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == str(out)
    assert f"int4-g32-zeros: {render.headline(manifest.quality)} (report: {out}.report)" in printed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.report", "text"]


def test_within_and_past_a_limit(checkpoint, text, tmp_path, capsys):
    out = tmp_path / "deep" / "out"
    assert command(checkpoint, out, text, "--max-tail-kl", "1e-7", "--max-rare-flips", 1) == 3
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    report = json.loads((tmp_path / "deep" / "out.report" / "report.json").read_text())
    tail = report["all"]["kl_p99.9"]
    assert f"KL p99.9 is {tail:.4g} nats, past --max-tail-kl 1e-07; {out} is not published" in captured.err
    assert "flipped" not in captured.err
    assert f"the report is in {out}.report; most is lost in {FRAGILE}, " in captured.err
    assert captured.out.index(FRAGILE) < captured.out.index("layers_0/")
    assert report["weights"][0]["name"] == FRAGILE
    assert report["weights"][0]["kl_mean"] < report["all"]["kl_mean"] * 2
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["out.report"]

    assert command(checkpoint, out, text, "--max-tail-kl", tail * 1.01) == 0
    before = tree(out)
    assert command(checkpoint, out, text, "--max-tail-kl", "0", "--force") == 3
    assert tree(out) == before
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["out", "out.report"]


def test_flips_of_rare_tokens_are_a_limit():
    found = {"all": {"kl_p99.9": 0.5}, "rare": {"flips": 0.02}}
    assert Limits(0.5, 0.02).exceeded(found) == []
    assert Limits(rare_flips=0.0199).exceeded(found) == [
        "2.000% of sure rare tokens flipped, past --max-rare-flips 1.990%"
    ]
    assert len(Limits(0.1, 0.0).exceeded(found)) == 2
    with pytest.raises(SourceError, match="no rare token of which the reference is sure; give a longer one"):
        Limits(rare_flips=0.5).exceeded({**found, "rare": {"flips": None}})
    assert Limits(0.5).exceeded({**found, "rare": {"positions": 0}}) == []


def tail(folder: Path, plain: Path) -> float:
    return evaluate(folder, plain, TEXT, Settings((512,), TOKENS, KVDtypes()), None)["all"]["kl_p99.9"]


def nbytes(folder: Path) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(load_params(folder)))


def test_auto_mixed_raises_the_costliest_until_the_limit_holds(checkpoint, plain, text, tmp_path, capsys):
    kept = ("layers_0/*",)
    narrow, raised = Recipe("int4", GROUP, True, keep=kept), {FRAGILE: Scheme("int8")}
    for name, recipe, some in (("one", narrow, raised), ("int4", narrow, {}), ("int8", Recipe("int8", keep=kept), {})):
        convert(HFFolder(checkpoint), tmp_path / name, name="", dtype="float32", recipe=recipe, raised=some)
    limit = tail(tmp_path / "one", plain) * 1.001
    assert limit < tail(tmp_path / "int4", plain)

    out = tmp_path / "out"
    assert command(checkpoint, out, text, "--keep", *kept, "--max-tail-kl", limit, "--auto-mixed") == 0
    manifest = read_manifest(out)
    assert {path for path, scheme in manifest.schemes.items() if scheme == Scheme("int8")} == {FRAGILE}
    assert {str(scheme) for path, scheme in manifest.schemes.items() if path != FRAGILE} == {"int4-g32-zeros"}
    assert manifest.quantisation == "int4-g32-zeros, 1 of 4 weights int8"
    assert tail(out, plain) == pytest.approx(manifest.quality["all"]["kl_p99.9"], rel=1e-3)
    assert manifest.quality["all"]["kl_p99.9"] <= limit

    width, outputs = manifest.config.hidden_size, 2 * manifest.config.intermediate_size
    extra = outputs * width + 4 * outputs - narrow_bytes(outputs, width)
    sizes = {name: nbytes(tmp_path / name) for name in ("int4", "out", "int8")}
    assert sizes["out"] - sizes["int4"] == extra
    assert sizes["int4"] < sizes["out"] < sizes["int8"]
    printed = capsys.readouterr().out
    assert f"past --max-tail-kl {limit:g}; trying 1 of 4 weights in int8\n" in printed
    assert f"in int8: {FRAGILE}\n" in printed
    assert (
        f"weights take {sizes['out'] / 1e6:.1f} MB: {extra / 1e6:.1f} MB ({extra / sizes['int4']:.1%}) more than with "
        f"none in int8, {(sizes['int8'] - sizes['out']) / 1e6:.1f} MB less than with all\n"
    ) in printed


def test_auto_mixed_that_cannot_reach_its_limit(checkpoint, text, tmp_path, capsys):
    flags = ["--keep", "layers_0/*", "--keep", "*/attn/*", "--max-tail-kl", 0, "--auto-mixed"]
    assert command(checkpoint, tmp_path / "out", text, *flags) == 3
    captured = capsys.readouterr()
    assert [line.split("; ")[1] for line in captured.out.splitlines() if "trying" in line] == [
        f"trying {count} of 2 weights in int8" for count in (1, 2)
    ]
    assert captured.err.startswith("refused: int4-g32-zeros, 2 of 2 weights int8: KL p99.9 is ")
    report = json.loads((tmp_path / "out.report" / "report.json").read_text())
    assert {w["scheme"] for w in report["weights"]} == {"int8"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.report", "text"]


def test_tries_double_and_cheap_bytes_go_first(plain):
    """The order is by KL for each byte more, not by KL."""
    manifest = dataclasses.replace(read_manifest(plain), schemes=dict.fromkeys(TENSORS, Scheme("int4", GROUP)))
    manifest.schemes["layers_0/attn/o/weight"] = Scheme("int8")  # wide already
    cost = dict.fromkeys(TENSORS, 1.0) | {"layers_1/attn/o/weight": 0.5, "lm_head/weight": 1.5}
    costs = [
        WeightCost(path, (path,), "int4", bytes_in(path, manifest.schemes[path]), kl, kl) for path, kl in cost.items()
    ]
    tried = []

    def refuse(raised):
        tried.append(list(raised))
        raise Refused(manifest, ["x"], costs, Path())

    with pytest.raises(Refused):
        convert_within(refuse, True, lambda line: None)
    assert [len(raised) for raised in tried] == [0, 1, 2, 4, 8, 9]
    order = tried[-1]
    assert set(order) == set(TENSORS) - {"layers_0/attn/o/weight"}
    worth = [cost[path] / (bytes_in(path, Scheme("int8")) - bytes_in(path, manifest.schemes[path])) for path in order]
    assert worth == sorted(worth, reverse=True)
    assert order[0] != "lm_head/weight"
    tried.clear()
    with pytest.raises(Refused):
        convert_within(refuse, False, lambda line: None)
    assert tried == [[]]


def bytes_in(path: str, scheme: Scheme) -> int:
    shape = rules.param_shape(config_from_hf({**TINY_CONFIG, **CONFIG}), path)
    return sum(x.size * x.dtype.itemsize for x in qtensor.abstract(scheme, shape).arrays.values())


def test_bad_flags_are_one_sentence(checkpoint, text, tmp_path, capsys):
    out, given = tmp_path / "out", ["--text", str(text)]
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("")
    for flags, words in (
        (["--weights", "int4", "--max-tail-kl", "1"], "give --text FILE"),
        (["--weights", "int4", "--max-tokens", "9"], "give --text FILE"),
        (["--weights", "int4", "--auto-mixed"], "give --text FILE"),
        (["--weights", "int4", *given, "--auto-mixed"], "give --max-tail-kl or --max-rare-flips"),
        (["--weights", "int8", *given, "--auto-mixed", "--max-tail-kl", "1"], "choose --weights int4"),
        ([*given, "--max-tail-kl", "1"], "choose --weights int8 or int4"),
        (["--weights", "int4", *given, "--max-tail-kl", "-1"], "--max-tail-kl takes nats, 0 or more, got -1"),
        (["--weights", "int4", *given, "--max-tail-kl", "nan"], "got nan"),
        (["--weights", "int4", *given, "--max-rare-flips", "5"], "a share from 0 to 1, like 0.005, got 5"),
        (["--weights", "int4", *given, "--max-tokens", "1"], "--max-tokens must be >= 2, got 1"),
        (["--weights", "int4", "--text", str(tmp_path / "none")], "none: No such file"),
        (["--weights", "int4", "--text", str(tmp_path / "bytes")], "not UTF-8"),
        (["--weights", "int4", "--text", str(tmp_path / "empty")], "fewer than two tokens"),
    ):
        assert main(["convert", str(checkpoint), str(out), "--dtype", "float32", *flags]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bytes", "empty", "text"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, FloatingPointError("a model's logits are not finite")])
def test_nothing_is_left_of_a_run_that_ended_in_its_evaluation(
    checkpoint, text, tmp_path, capsys, monkeypatch, failure
):
    def score(self, tokens):
        raise failure

    monkeypatch.setattr("jaxsqueeze.report.quality.scoring.Comparison.score", score)
    assert command(checkpoint, tmp_path / "out", text) == (130 if failure is KeyboardInterrupt else 2)
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["text"]


def test_a_full_disk_is_told_before_a_reference_is_made(checkpoint, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAXSQUEEZE_CACHE", str(tmp_path / "cache"))
    usage = dataclasses.make_dataclass("Usage", ["free"])(1000)
    monkeypatch.setattr(converting.shutil, "disk_usage", lambda path: usage)
    assert command(checkpoint, tmp_path / "out", text) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'cache'}" in error
    assert "the disk is full" in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["text"]


def test_an_out_that_may_not_be_replaced_is_told_first(checkpoint, text, tmp_path, capsys, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    monkeypatch.setattr("jaxsqueeze.checkpoint.ensure.convert", lambda *args, **kwargs: pytest.fail("converted"))
    assert command(checkpoint, tmp_path / "out", text) == 2
    assert "not a converted checkpoint" in capsys.readouterr().err
