"""Calibrated conversions: nearer to the model than the nearest codes are, whatever mix of formats is asked for."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsqueeze.checkpoint.assemble import build_unit, prepare
from jaxsqueeze.checkpoint.calibration.text import ROWS, Calibration, windows
from jaxsqueeze.checkpoint.calibration.units import CalibratedUnits
from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.gguf_source import GGUFSource
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.manifest import read_manifest
from jaxsqueeze.checkpoint.orbax_units import checkpointer
from jaxsqueeze.checkpoint.store import load_params
from jaxsqueeze.cli import main
from jaxsqueeze.config import KVDtypes
from jaxsqueeze.kv.pool import abstract_pool, allocate, storage
from jaxsqueeze.models.attention import GroupPages, QueryRows
from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.decoder import Decoder, Params
from jaxsqueeze.quant.scheme import Recipe, Scheme
from pallas_kernels.target import CPU
from tests.checkpoint.build import flat
from tests.checkpoint.test_gguf_codes import LAYERS, Kind, write

DTYPE = jnp.dtype(jnp.float32)


def hidden(out: Path, tokens: np.ndarray) -> np.ndarray:
    """Final hidden states [n * length, H] of ``tokens`` [n, length], with the weights that are stored."""
    return np.asarray(_hidden(read_manifest(out).config, load_params(out), tokens))


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def _hidden(cfg: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    n, length = tokens.shape
    pool = allocate(abstract_pool(cfg, (n + 1,), length, storage(KVDtypes(), DTYPE, "cpu")))
    pages = GroupPages(jnp.arange(1, n + 1)[:, None], jnp.zeros(n, jnp.int32))
    rows = (QueryRows(jnp.broadcast_to(jnp.arange(length), (n, length)), (pages,)),)
    return Decoder(cfg, DTYPE, length, CPU).apply({"params": params}, tokens.reshape(-1), pool, rows)[0]


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "out"
    convert(HFFolder(folder), out, name="plain", dtype="float32")
    return out


def test_nearer_to_the_model_than_the_nearest_codes(folder, plain, text, tmp_path):
    """On windows that calibration did not read."""
    flags = "--dtype", "float32", "--weights", "int2", "--group-size", "32", "--zero-points"
    command = "convert", str(folder), str(tmp_path / "a"), *flags, "--calibration", str(text)
    assert main([*command, "--calibration-tokens", "1500"]) == 0
    assert read_manifest(tmp_path / "a").quantisation == "int2-g32-zeros, calibrated"
    assert not (tmp_path / "a.calibration").exists()
    convert(HFFolder(folder), tmp_path / "b", name="q", dtype="float32", recipe=Recipe("int2", 32, True))
    other = tmp_path / "other.txt"
    other.write_text("".join(f"Things that come in lines of {i} + {i * 7}, in a text à la mode.\n" for i in range(10)))
    tokens = windows(prepare(HFFolder(folder)), Calibration(other))
    right, *found = (hidden(out, tokens) for out in (plain, tmp_path / "a", tmp_path / "b"))
    error = [np.linalg.norm(x - right) / np.linalg.norm(right) for x in found]
    assert error[0] < 0.85 * error[1]
    a, b = (dict(flat(load_params(out))) for out in (tmp_path / "a", tmp_path / "b"))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(a)] == [(x.shape, x.dtype) for x in jax.tree.leaves(b)]
    for path in ("embed/weight", "lm_head/weight", "final_norm/scale"):
        np.testing.assert_array_equal(a[path], b[path])


MIXED = {
    "layers_0/attn/qkv/weight": Scheme("int8"),
    "layers_0/attn/o/weight": Scheme("int4", 32, True, "float16"),
    "layers_0/mlp/down/weight": Scheme("int2", 32, True, "float16"),  # gate_up is kept: nothing can be folded into it
    "layers_1/mlp/gate_up/weight": Scheme("fp8"),
    "embed/weight": Scheme("int8"),
}


def test_formats_may_differ_and_what_is_kept_stays(folder, text, tmp_path):
    job, dtype = prepare(HFFolder(folder)), np.dtype(np.float32)
    read = windows(job, Calibration(text))
    with checkpointer() as orbax:
        units = CalibratedUnits(job, dtype, MIXED, read, tmp_path / "work", orbax, lambda *_: None)
        built = {unit: units.build(unit) for unit in job.units}
    found = dict(flat(built))
    right = dict(flat({unit: build_unit(job, unit, dtype, MIXED) for unit in job.units}))
    assert {path: (x.shape, x.dtype) for path, x in found.items()} == {p: (x.shape, x.dtype) for p, x in right.items()}
    changed = {path for path, x in found.items() if not np.array_equal(x, right[path])}
    own = {p.rsplit("/", 1)[0] + "/" for p in MIXED if p.startswith("layers_")}
    norms = {"layers_0/input_norm/scale", "layers_1/mlp_norm/scale"}
    assert {path for path in changed if not any(path.startswith(start) for start in own)} <= norms
    assert {path.rsplit("/", 2)[0] + "/" for path in changed if path.endswith("codes")} == own


def test_codes_that_the_source_has_are_taken(tmp_path):
    write(tmp_path / "x.gguf", dict.fromkeys(LAYERS, Kind.Q4_1))
    job, dtype = prepare(GGUFSource(tmp_path / "x.gguf")), np.dtype(np.float32)
    path = "layers_0/attn/o/weight"
    schemes = {path: job.stored[path], "layers_0/attn/qkv/weight": Scheme("int4", 64, scale_dtype="float16")}
    read = np.random.default_rng(0).integers(0, job.config.vocab_size, (ROWS, 64)).astype(np.int32)
    with checkpointer() as orbax:
        units = CalibratedUnits(job, dtype, schemes, read, tmp_path / "work", orbax, lambda *_: None)
        units.build("embed")
        found = dict(flat(units.build("layers_0")))
    right = dict(flat(build_unit(job, "layers_0", dtype, schemes)))
    changed = {path for path, x in found.items() if not np.array_equal(x, right[path])}
    assert "attn/qkv/weight/codes" in changed
    assert changed <= {f"attn/qkv/weight/{name}" for name in ("codes", "scales")} | {"input_norm/scale"}


def test_windows_are_spread_over_the_text(folder, text):
    job = prepare(HFFolder(folder))
    found = windows(job, Calibration(text, 600))
    assert found.shape == (600 // 63 // ROWS * ROWS, 64)
    assert np.all(found[:, 0] == job.config.bos_token_id)
    ids = windows(job, Calibration(text, 10**9))
    assert ids.size > 2500
    np.testing.assert_array_equal(ids[[0, -1], 1:], found[[0, -1], 1:])


def test_texts_that_calibrate_nothing(folder, text, tmp_path, golden, capsys):
    bad = tmp_path / "bad.txt"
    out = tmp_path / "out"

    def error(source: Path, *flags: str) -> str:
        assert main(["convert", str(source), str(out), *flags]) == 2
        assert not out.exists()
        assert list(tmp_path.glob("out*")) == []
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        return message

    int4 = "--weights", "int4", "--calibration"
    assert "No such file" in error(folder, *int4, str(bad))
    bad.write_bytes(b"\xff\xfe" * 1000)
    assert "not UTF-8" in error(folder, *int4, str(bad))
    bad.write_text("too short")
    assert "has 9 tokens, and calibration needs 252 or more" in error(folder, *int4, str(bad))
    assert "has no tokenizer.json" in error(golden / "llama", *int4, str(text))
    assert "int2 weights must be calibrated; pass --calibration" in error(folder, "--weights", "int2")
    assert "--calibration is for weights that are quantised here" in error(folder, "--calibration", str(text))
