"""Programs on disk: loaded they do what they did, and whatever is wrong with the folder, programs are compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsqueeze.runner.program_store import KEPT, ProgramStore


@pytest.fixture
def cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "programs"
    jax.config.update("jax_compilation_cache_dir", before)


def compiled(factor: int) -> jax.stages.Compiled:
    """Adds ``factor * y`` to the donated x, inside a pytree."""
    step = jax.jit(lambda tree, y: {"x": tree["x"] + factor * y}, donate_argnums=0)
    shape = jax.ShapeDtypeStruct((1000,), jnp.float32)
    return step.lower({"x": shape}, shape).compile()


def test_a_loaded_program_computes_and_donates_as_before(cache):
    ProgramStore("a").save("step", compiled(3))
    program = ProgramStore("a").load("step")
    x, y = jnp.arange(1000.0), jnp.ones(1000)
    result = program({"x": x}, y)
    np.testing.assert_array_equal(result["x"], np.arange(1000) + 3)
    assert x.is_deleted()
    assert program.memory_analysis().alias_size_in_bytes == 4000


def test_other_facts_names_and_settings_find_nothing(cache):
    ProgramStore("a", 1).save("step", compiled(3))
    assert ProgramStore("a", 1).load("step") is not None
    assert ProgramStore("a", 2).load("step") is None
    assert ProgramStore("a", 1).load("other") is None


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"x" + b, lambda b: b[:-9] + bytes(9)]
)
def test_a_damaged_file_is_as_good_as_none(cache, damage, caplog):
    store = ProgramStore("a")
    store.save("step", compiled(3))
    (path,) = cache.glob("*/step")
    path.write_bytes(damage(path.read_bytes()))
    assert store.load("step") is None
    assert "step" in caplog.text
    store.save("step", compiled(3))
    assert store.load("step") is not None


def test_a_folder_that_cannot_be_written_costs_a_warning(cache, caplog):
    cache.write_text("a file where the folder should be")
    store = ProgramStore("a")
    store.save("step", compiled(3))
    assert store.load("step") is None
    store.prune()
    assert "step" in caplog.text


def test_without_a_cache_folder_nothing_is_kept(tmp_path, cache):
    jax.config.update("jax_compilation_cache_dir", None)
    store = ProgramStore("a")
    store.save("step", compiled(3))
    assert store.load("step") is None
    store.prune()
    assert not list(tmp_path.iterdir())


def test_only_the_last_used_configurations_stay(cache):
    program = compiled(3)
    for i in range(KEPT + 3):
        ProgramStore(i).save("step", program)
        ProgramStore(0).load("step")
    ProgramStore(0).prune()
    kept = [i for i in range(KEPT + 3) if ProgramStore(i).load("step") is not None]
    assert kept == [0, *range(4, KEPT + 3)]


def test_no_half_written_file_is_left(cache):
    ProgramStore("a").save("step", compiled(3))
    assert [path.name for path in cache.glob("*/*")] == ["step"]
