"""The memory ledger: bytes that add up, and what they hold."""

from __future__ import annotations

import io

import jax
from rich.console import Console

from tests.engine.conftest import FULL_PAGES, OPTIONS, PAGE_BYTES, WINDOW_PAGES


def test_bytes_are_those_of_the_arrays(engine):
    ledger, runner = engine.ledger, engine._runner
    assert ledger.weight_bytes == sum(x.nbytes for x in jax.tree.leaves(runner._variables["params"]))
    assert ledger.kv_bytes == sum(x.nbytes for x in jax.tree.leaves(runner._pool))
    assert ledger.step_bytes > 0


def test_what_the_pool_holds(engine):
    ledger = engine.ledger
    full, window = ledger.groups
    assert (full.name, full.layers, window.name, window.layers) == ("full", 1, "window5", 1)
    assert (full.pages, window.pages) == engine.stats().pages_total
    assert full.tokens == full.pages * OPTIONS["page_size"]
    assert ledger.kv_bytes == (full.pages + window.pages + 2) * PAGE_BYTES  # page 0 of each is never handed out
    assert ledger.full_requests == min(full.pages // FULL_PAGES, window.pages // WINDOW_PAGES) == 1


def test_it_prints(engine):
    out = io.StringIO()
    Console(file=out, width=120).print(engine.ledger)
    text = out.getvalue()
    for part in ("weights", "KV pool, full", "KV pool, window5", "25 pages, 200 tokens (1 layers)", "step buffers"):
        assert part in text
    assert "1 requests of 128 tokens at once" in text


def test_timings_add_up(engine, llm):
    before = engine.timings.steps
    llm.generate([[5, 6, 7]] * 3)
    t = engine.timings
    assert t.steps > before
    assert 0 < t.host <= t.total
    assert 0 <= t.exposed <= t.host + 1e-9
