"""Programs on disk: loaded they do what they did, and whatever is wrong with the folder, programs are compiled."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsqueeze.runner.program_store import KEPT, ProgramStore


def compiled(factor: int) -> jax.stages.Compiled:
    """Adds ``factor * y`` to the donated x, inside a pytree."""
    step = jax.jit(lambda tree, y: {"x": tree["x"] + factor * y}, donate_argnums=0)
    shape = jax.ShapeDtypeStruct((1000,), jnp.float32)
    return step.lower({"x": shape}, shape).compile()


def test_a_loaded_program_computes_and_donates_as_before(tmp_path):
    ProgramStore(tmp_path, "a").save("step", compiled(3))
    program = ProgramStore(tmp_path, "a").load("step")
    x, y = jnp.arange(1000.0), jnp.ones(1000)
    result = program({"x": x}, y)
    np.testing.assert_array_equal(result["x"], np.arange(1000) + 3)
    assert x.is_deleted()
    assert program.memory_analysis().alias_size_in_bytes == 4000


def test_other_facts_names_and_settings_find_nothing(tmp_path):
    ProgramStore(tmp_path, "a", 1).save("step", compiled(3))
    assert ProgramStore(tmp_path, "a", 1).load("step") is not None
    assert ProgramStore(tmp_path, "a", 2).load("step") is None
    assert ProgramStore(tmp_path, "a", 1).load("other") is None


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"x" + b, lambda b: b[:-9] + bytes(9)]
)
def test_a_damaged_file_is_as_good_as_none(tmp_path, damage, caplog):
    store = ProgramStore(tmp_path, "a")
    store.save("step", compiled(3))
    (path,) = tmp_path.glob("*/step")
    path.write_bytes(damage(path.read_bytes()))
    assert store.load("step") is None
    assert "step" in caplog.text
    store.save("step", compiled(3))
    assert store.load("step") is not None


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("where the folder should be")
    store = ProgramStore(tmp_path / "file", "a")
    store.save("step", compiled(3))
    assert store.load("step") is None
    store.prune()
    assert "step" in caplog.text


def test_without_a_folder_nothing_is_kept():
    store = ProgramStore(None, "a")
    store.save("step", compiled(3))
    assert store.load("step") is None
    store.prune()


def test_only_the_last_used_configurations_stay(tmp_path):
    program = compiled(3)
    for i in range(KEPT + 3):
        ProgramStore(tmp_path, i).save("step", program)
        ProgramStore(tmp_path, 0).load("step")
    ProgramStore(tmp_path, 0).prune()
    kept = [i for i in range(KEPT + 3) if ProgramStore(tmp_path, i).load("step") is not None]
    assert kept == [0, *range(4, KEPT + 3)]


def test_no_half_written_file_is_left(tmp_path, monkeypatch):
    store = ProgramStore(tmp_path, "a")
    store.save("step", compiled(3))
    monkeypatch.setattr(Path, "write_bytes", no_space)
    store.save("other", compiled(3))
    assert [path.name for path in tmp_path.glob("*/*")] == ["step"]


def test_a_folder_that_may_only_be_read_is_used(tmp_path, monkeypatch):
    ProgramStore(tmp_path, "a").save("step", compiled(3))
    monkeypatch.setattr(os, "utime", no_space)
    assert ProgramStore(tmp_path, "a").load("step") is not None


def test_a_configuration_that_another_process_drops_meanwhile_does_no_harm(tmp_path, monkeypatch):
    ProgramStore(tmp_path, "a").save("step", compiled(3))
    gone = tmp_path / "gone"
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([gone]))
    ProgramStore(tmp_path, "a").prune()
    assert ProgramStore(tmp_path, "a").load("step") is not None


def no_space(*_args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
