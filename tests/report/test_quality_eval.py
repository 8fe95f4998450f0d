"""Two models on one text: scores against dense float64 models, the command, a run that goes on."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.source import SourceError
from jaxsqueeze.cli import main
from jaxsqueeze.config import KVDtypes
from jaxsqueeze.quant.scheme import Recipe
from jaxsqueeze.report.quality import evaluate as module
from jaxsqueeze.report.quality.evaluate import Settings, evaluate
from jaxsqueeze.report.quality.scoring import Comparison, Subject
from tests.checkpoint.build import read_tensors
from tests.engine.conftest import HF
from tests.engine.dense_oracle import DenseOracle
from tests.quant.rounding import nearest

GROUP = 32
LENGTH = 300  # more than one step of the device


@pytest.fixture(scope="module")
def folders(hf_checkpoint, tmp_path_factory):
    """(checkpoint, plain, quantised)"""
    checkpoint, parent = hf_checkpoint(**HF), tmp_path_factory.mktemp("quality")
    convert(HFFolder(checkpoint), parent / "plain", name="plain", dtype="float32")
    recipe = Recipe("int4", GROUP, True)
    convert(HFFolder(checkpoint), parent / "int4", name="quantised", dtype="float32", recipe=recipe)
    return checkpoint, parent / "plain", parent / "int4"


def test_scores_are_those_of_dense_models(folders):
    checkpoint, plain, quantised = folders
    hf, tensors = json.loads((checkpoint / "config.json").read_text()), read_tensors(checkpoint)
    rounded = dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            padded = np.pad(weight, ((0, 0), (0, -weight.shape[1] % (2 * GROUP))))
            rounded[name] = nearest(padded, "int4", GROUP, True)[0][:, : weight.shape[1]]
    tokens = np.random.default_rng(0).integers(0, 256, LENGTH).astype(np.int32)
    ref, cand = (DenseOracle(hf, t).log_softmax(tokens)[:-1] for t in (tensors, rounded))

    auto = KVDtypes()
    comparison = Comparison(Subject.load(plain, LENGTH, auto), Subject.load(quantised, LENGTH, auto))
    for window in (tokens, tokens[:2], tokens):  # the pool's old content is of no consequence
        found = comparison.score(window)
        n = len(window) - 1
        at = np.arange(n), window[1:]
        np.testing.assert_allclose(found["ref_nll"], -ref[:n][at], atol=2e-4)
        np.testing.assert_allclose(found["nll"], -cand[:n][at], atol=2e-3)
        kl = (np.exp(ref[:n]) * (ref[:n] - cand[:n])).sum(axis=1)
        np.testing.assert_allclose(found["kl"], kl, rtol=0.05, atol=1e-4)
        np.testing.assert_allclose(found["ref_sure"], np.exp(ref[:n].max(axis=1)), atol=1e-4)
        assert np.mean(found["ref_top"] == ref[:n].argmax(axis=1)) > 0.99
        assert np.mean(found["top"] == cand[:n].argmax(axis=1)) > 0.97


TEXT = "The quick brown fox jumps over the lazy dog. " * 12
SETTINGS = Settings((16, 64), 200, KVDtypes())


def test_a_model_equals_itself_and_narrow_kv_does_not(folders):
    _, plain, _ = folders
    same = evaluate(plain, plain, TEXT, SETTINGS, None)
    assert same["all"]["kl_max"] < 1e-6
    assert same["all"]["agreement"] == 1
    assert same["all"]["perplexity"] == pytest.approx(same["all"]["ref_perplexity"])
    assert (same["candidate"], same["tokens"]) == ("plain (float32)", 200 + 4 * HAS_BOS)
    narrow = evaluate(plain, plain, TEXT, Settings((16, 64), 200, KVDtypes("int8", "int4")), None)
    assert 1e-6 < narrow["all"]["kl_mean"] < 0.2
    assert narrow["candidate"] == "plain (float32, K int8, V int4)"


HAS_BOS = 1


def test_a_run_goes_on_where_it_stopped(folders, tmp_path, monkeypatch):
    _, plain, quantised = folders
    whole = evaluate(quantised, plain, TEXT, SETTINGS, tmp_path / "a")
    scored = []
    score = Comparison.score

    def stops(self, tokens):
        if len(scored) == 2:
            raise KeyboardInterrupt
        scored.append(tokens)
        return score(self, tokens)

    monkeypatch.setattr(Comparison, "score", stops)
    with pytest.raises(KeyboardInterrupt):
        evaluate(quantised, plain, TEXT, SETTINGS, tmp_path / "b")
    assert sorted(p.name for p in (tmp_path / "b" / "windows").iterdir()) == ["0.npz", "1.npz", "key"]
    monkeypatch.setattr(Comparison, "score", lambda self, tokens: scored.append(tokens) or score(self, tokens))
    assert evaluate(quantised, plain, TEXT, SETTINGS, tmp_path / "b") == whole
    windows = -(-200 // (64 - HAS_BOS))
    assert len(scored) == windows
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["report.json", "report.png"]
    assert json.loads((tmp_path / "b" / "report.json").read_text()) == whole


def test_windows_of_another_run_are_dropped(folders, tmp_path):
    _, plain, quantised = folders
    old = module._parts(tmp_path, module._key(quantised, plain, TEXT, SETTINGS))
    (old / "0.npz").write_text("x")
    assert module._parts(tmp_path, module._key(quantised, plain, TEXT, SETTINGS)) == old
    assert (old / "0.npz").is_file()
    module._parts(tmp_path, module._key(quantised, plain, TEXT + ".", SETTINGS))
    assert not (old / "0.npz").exists()


def test_what_cannot_be_compared(folders, tmp_path):
    _, plain, quantised = folders
    with pytest.raises(SourceError, match="fewer than two tokens"):
        evaluate(quantised, plain, "", SETTINGS, None)
    with pytest.raises(SourceError, match="a context of 5000 tokens is past the 1024"):
        evaluate(quantised, plain, TEXT, Settings((5000,), None, KVDtypes()), None)


def test_the_command(folders, tmp_path, capsys):
    _, plain, quantised = folders
    text = tmp_path / "text"
    text.write_text(TEXT)
    args = ["eval", str(quantised), "--reference", str(plain), "--text", str(text)]
    assert main([*args, "--context", "16,64", "--max-tokens", "100", "--kv-dtype", "int8"]) == 0
    assert "quantised (int4-g32-zeros, KV int8) against plain (float32)" in capsys.readouterr().out.replace("\n", " ")
    for more, words in (
        (["--context", "64,16"], "--context takes rising numbers of tokens, like 512,2048, got '64,16'"),
        (["--context", "many"], "got 'many'"),
        (["--max-tokens", "1"], "--max-tokens must be >= 2, got 1"),
        (["--kv-dtype", "int3"], "kv_dtype must be one of"),
        (["--text", str(tmp_path / "none")], "none: No such file"),
    ):
        assert main([*args, *more]) == 2
        assert words in capsys.readouterr().err
    text.write_bytes(b"\xff\xfe\x00")
    assert main(args) == 2
    assert "not UTF-8" in capsys.readouterr().err
