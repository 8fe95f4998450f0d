"""The converted folder: what it holds, how it loads, and that it appears whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxsqueeze.checkpoint import convert as convert_module
from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.manifest import FORMAT_VERSION, is_converted, read_manifest
from jaxsqueeze.checkpoint.source import SourceError
from jaxsqueeze.checkpoint.store import load_params
from jaxsqueeze.text.tokenizer import Tokenizer
from tests.checkpoint.build import CHAT_TEMPLATE, TINY_CONFIG, flat, read_tensors, write_hf_checkpoint, write_random

# Converts argv[1] to argv[2]; with argv[3], prints a line after each unit and sleeps that many seconds.
SLOW = """
import sys, time
from pathlib import Path
from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.hf import HFFolder
def report(stage, done, total):
    print(stage, done, total, flush=True)
    time.sleep(float(sys.argv[3]))
convert(HFFolder(Path(sys.argv[1])), Path(sys.argv[2]), name="slow", report=report, force="--force" in sys.argv)
"""

# The command line, unable to write a file of more than 1 MB.
LIMITED = """
import resource, sys
from jaxsqueeze.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
sys.exit(main(["convert", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def folder(hf_checkpoint: Callable[..., Path]) -> Path:
    return hf_checkpoint()


def left_in(parent: Path) -> set[str]:
    return {p.name for p in parent.iterdir()}


def expected_params(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our layout from Hugging Face's tensors, by explicit loops over heads."""
    c = TINY_CONFIG
    dim, kv = c["head_dim"], c["num_key_value_heads"]
    group = c["num_attention_heads"] // kv
    out = {
        "embed/weight": tensors["model.embed_tokens.weight"],
        "final_norm/scale": tensors["model.norm.weight"],
        "lm_head/weight": tensors["lm_head.weight"],
    }
    for i in range(c["num_hidden_layers"]):
        t = {k.removeprefix(f"model.layers.{i}."): v for k, v in tensors.items() if f".layers.{i}." in k}
        qkv = np.zeros((kv, group + 2, dim, c["hidden_size"]), np.float32)
        for head in range(kv):
            for g in range(group):
                q = head * group + g
                qkv[head, g] = t["self_attn.q_proj.weight"][q * dim : (q + 1) * dim]
            qkv[head, group] = t["self_attn.k_proj.weight"][head * dim : (head + 1) * dim]
            qkv[head, group + 1] = t["self_attn.v_proj.weight"][head * dim : (head + 1) * dim]
        out |= {
            f"layers_{i}/attn/qkv/weight": qkv,
            f"layers_{i}/attn/o/weight": t["self_attn.o_proj.weight"],
            f"layers_{i}/mlp/gate_up/weight": np.stack([t["mlp.gate_proj.weight"], t["mlp.up_proj.weight"]]),
            f"layers_{i}/mlp/down/weight": t["mlp.down_proj.weight"],
            f"layers_{i}/input_norm/scale": t["input_layernorm.weight"],
            f"layers_{i}/mlp_norm/scale": t["post_attention_layernorm.weight"],
        }
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(folder: Path, tmp_path: Path, dtype: str) -> None:
    manifest = convert(HFFolder(folder), tmp_path / "out", name="tiny", dtype=dtype)
    params = dict(flat(load_params(tmp_path / "out", manifest.config)))
    expected = expected_params(read_tensors(folder))
    assert set(params) == set(expected)
    for path, value in expected.items():
        stored = np.float32 if path.endswith("/scale") else jnp.dtype(dtype)
        assert isinstance(params[path], jax.Array)
        assert params[path].dtype == stored
        np.testing.assert_array_equal(np.asarray(params[path]), value.astype(stored))


def test_loading_in_another_dtype(folder: Path, tmp_path: Path) -> None:
    convert(HFFolder(folder), tmp_path / "out", name="tiny", dtype="float32")
    expected = expected_params(read_tensors(folder))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    seen = []
    params = load_params(tmp_path / "out", dtype="bfloat16", sharding=lambda path: seen.append(path) or sharding)
    assert set(seen) == set(expected)
    for path, value in flat(params):
        stored = np.float32 if path.endswith("/scale") else ml_dtypes.bfloat16
        np.testing.assert_array_equal(np.asarray(value), expected[path].astype(stored))


def test_manifest(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    returned = convert(HFFolder(folder), out, name="some/model", dtype="float32")
    manifest = read_manifest(out)
    assert manifest == returned
    assert (manifest.dtype, manifest.quantisation, manifest.source) == ("float32", "none", "some/model")
    assert manifest.config.head_dim == 8
    assert manifest.config.eos_token_ids == (2,)
    assert manifest.versions["jax"] == jax.__version__
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    lines = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}" for n in names]
    assert manifest.source_hash == hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert json.loads((out / "manifest.json").read_text())["config"]["num_kv_heads"] == 2


def test_tokenizer_and_chat_template_are_kept(folder: Path, tmp_path: Path) -> None:
    convert(HFFolder(folder), tmp_path / "out", name="tiny")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == CHAT_TEMPLATE


def test_planted_payloads_are_neither_run_nor_copied(tmp_path: Path) -> None:
    """From the checkpoint to the loaded model: pickles and code beside good weights, named by every config."""
    source, out, ran = tmp_path / "source", tmp_path / "out", tmp_path / "ran"
    (source / "original").mkdir(parents=True)
    hooks = {"auto_map": {"AutoModelForCausalLM": "modeling_x.X", "AutoTokenizer": ["modeling_x.X", None]}}
    write_hf_checkpoint(source, {**TINY_CONFIG, **hooks, "trust_remote_code": True})
    settings = source / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **hooks, "tokenizer_class": "X"}))
    pickled = b"cos\nsystem\n(S'touch " + str(ran).encode() + b"'\ntR."
    pickles = ("pytorch_model.bin", "training_args.bin", "tokenizer.pkl", "tokenizer.model", "original/model.pth")
    for name in pickles:
        (source / name).write_bytes(pickled)
    for name in ("modeling_x.py", "original/__init__.py"):
        (source / name).write_text(f"open({str(ran)!r}, 'w')\n")
    convert(HFFolder(source), out, name="x")
    names = {str(p.relative_to(out)) for p in out.rglob("*")}
    assert not names & {*pickles, "modeling_x.py", "original"}
    for name in ("pytorch_model.bin", "tokenizer.pkl", "params/tree.pkl"):
        (out / name).write_bytes(pickled)
    load_params(out)
    assert Tokenizer.load(out).encode("a")
    assert not ran.exists()


def test_existing_out_is_kept_without_force(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(HFFolder(folder), out, name="first")
    with pytest.raises(SourceError, match="--force"):
        convert(HFFolder(folder), out, name="second")
    assert read_manifest(out).source == "first"
    convert(HFFolder(folder), out, name="second", force=True)
    assert read_manifest(out).source == "second"
    load_params(out)
    assert left_in(tmp_path) == {"out"}


@pytest.mark.parametrize("force", [False, True])
def test_never_replaces_what_is_not_a_conversion(folder: Path, tmp_path: Path, force: bool) -> None:
    precious = tmp_path / "home" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    for out in (precious.parent, precious):
        with pytest.raises(SourceError, match="choose another OUT"):
            convert(HFFolder(folder), out, name="x", force=force)
    assert precious.read_text() == "years of work"


def test_bad_input_writes_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_hf_checkpoint(source, {**TINY_CONFIG, "architectures": ["Novel"]})
    with pytest.raises(SourceError):
        convert(HFFolder(source), tmp_path / "a" / "b" / "out", name="x")
    assert left_in(tmp_path) == {"source"}


def test_a_failed_write_leaves_the_old_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "deep" / "out"
    real = convert_module.write_unit

    def full_disk(orbax: object, target: Path, unit: str, tree: dict) -> None:
        if unit == "layers_1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        real(orbax, target, unit, tree)

    monkeypatch.setattr(convert_module, "write_unit", full_disk)
    with pytest.raises(SourceError, match="disk is full"):
        convert(HFFolder(folder), out, name="x")
    assert left_in(tmp_path) == set()
    monkeypatch.setattr(convert_module, "write_unit", real)
    convert(HFFolder(folder), out, name="old")
    monkeypatch.setattr(convert_module, "write_unit", full_disk)
    with pytest.raises(SourceError, match="disk is full"):
        convert(HFFolder(folder), out, name="new", force=True)
    assert read_manifest(out).source == "old"
    assert left_in(out.parent) == {"out"}


def test_too_little_space_is_found_before_writing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = convert_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(SourceError, match=r"disk is full, 0\.07 GB are needed and 0\.00 GB are free"):
        convert(HFFolder(folder), tmp_path / "out", name="x")
    assert left_in(tmp_path) == set()


def test_a_write_that_fails_inside_the_storage_library(tmp_path: Path) -> None:
    # A real refusal by the kernel (file size limit) while Orbax writes a tensor of 98 MB in several chunks.
    source = tmp_path / "source"
    write_random(source, {**TINY_CONFIG, "hidden_size": 768, "vocab_size": 64000, "tie_word_embeddings": True}, 1 << 30)
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(source), str(tmp_path / "out")], capture_output=True, text=True
    )
    assert run.returncode == 2, run.stderr
    assert run.stderr.count("\n") == 1
    assert "the disk is full" in run.stderr
    assert left_in(tmp_path) == {"source"}


def start(source: Path, out: Path, delay: float, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW, str(source), str(out), str(delay), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill_after_units(process: subprocess.Popen[str], units: int) -> None:
    assert process.stdout is not None
    for _ in range(units + 1):
        assert process.stdout.readline().startswith("converting")
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_killed_conversion_leaves_nothing_that_loads(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kill_after_units(start(folder, out, 0.3), units=2)
    assert not out.exists()
    remnants = left_in(tmp_path)
    assert remnants  # it was killed in the middle
    assert all(name.startswith(".") for name in remnants)
    for name in remnants:
        assert not is_converted(tmp_path / name)
    convert(HFFolder(folder), out, name="again")
    load_params(out)
    assert left_in(tmp_path) == {"out"}


def test_a_killed_replacement_keeps_the_old_folder(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(HFFolder(folder), out, name="old")
    kill_after_units(start(folder, out, 0.3, "--force"), units=2)
    assert read_manifest(out).source == "old"
    load_params(out)
    convert(HFFolder(folder), out, name="new", force=True)
    assert left_in(tmp_path) == {"out"}


def test_killed_between_the_two_renames(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(HFFolder(folder), out, name="old")
    out.rename(tmp_path / ".out.old")  # the state in between
    with pytest.raises(SourceError, match="--force"):
        convert(HFFolder(folder), out, name="new")
    assert read_manifest(out).source == "old"
    assert left_in(tmp_path) == {"out"}


def test_two_processes_do_not_fight(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    slow = start(folder, out, 0.3)
    assert slow.stdout is not None
    slow.stdout.readline()
    with pytest.raises(SourceError, match="another process"):
        convert(HFFolder(folder), out, name="impatient")
    begun = time.monotonic()
    manifest = convert(HFFolder(folder), out, name="patient", reuse=True)
    assert manifest.source == "slow"
    assert time.monotonic() - begun > 0.3
    assert slow.wait() == 0
    assert left_in(tmp_path) == {"out"}


def test_files_are_flushed_before_the_folder_appears(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    synced: set[str] = set()
    real = os.fsync

    def spy(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", spy)
    convert(HFFolder(folder), out, name="x")
    partial = tmp_path / ".out.partial"
    assert {str(partial / p.relative_to(out)) for p in (out, *out.rglob("*"))} <= synced
    assert str(tmp_path) in synced  # the rename itself


@pytest.mark.parametrize("damage", ["missing", "short", "manifest", "field", "version", "content"])
def test_damaged_folders_are_named(folder: Path, tmp_path: Path, damage: str) -> None:
    out = tmp_path / "out"
    convert(HFFolder(folder), out, name="x")
    data = max((p for p in (out / "params" / "layers_1").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    manifest = out / "manifest.json"
    named = data
    if damage == "missing":
        data.unlink()
    elif damage == "short":
        data.write_bytes(data.read_bytes()[:-1])
    elif damage == "content":
        for path in (p for p in (out / "params" / "layers_1").rglob("*") if p.is_file()):
            path.write_bytes(b"\x00" * path.stat().st_size)
        named = out / "params" / "layers_1"
    else:
        named = manifest
        text = manifest.read_text()
        changed = {
            "manifest": text[: len(text) // 2],
            "field": text.replace('"num_kv_heads"', '"kv_heads"'),
            "version": text.replace(f'"format_version": {FORMAT_VERSION}', '"format_version": 99'),
        }[damage]
        assert changed != text
        manifest.write_text(changed)
    with pytest.raises(SourceError, match="convert again") as caught:
        load_params(out)
    assert str(named) in str(caught.value)


def test_a_config_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = convert(HFFolder(folder), out, name="x").config
    with pytest.raises(SourceError, match="units"):
        load_params(out, dataclasses.replace(config, layers=config.layers[:1]))
    with pytest.raises(SourceError, match="embed/weight"):
        load_params(out, dataclasses.replace(config, vocab_size=100))
