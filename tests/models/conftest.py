"""Golden checkpoints, read without the checkpoint package (safetensors, tensor plan and rules only), and a paged
session that runs them and compares every logit with the reference."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxsqueeze.kv.pool import abstract_pool
from jaxsqueeze.models import families
from jaxsqueeze.models.attention import GroupPages, QueryRows
from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.decoder import Decoder
from jaxsqueeze.models.families import rules

GOLDEN = Path(__file__).parents[1] / "golden"


@dataclass(frozen=True)
class Golden:
    name: str
    cfg: ModelConfig
    flat: dict[str, np.ndarray]  # parameter path to array
    ids: np.ndarray  # i64[T]
    logits: np.ndarray  # f32[T, V], the reference's
    max_len: int  # served length at which the reference computed its rotary table

    @property
    def params(self) -> dict:
        """Nested parameter tree."""
        return nest(self.flat)


def nest(flat: dict[str, np.ndarray]) -> dict:
    tree: dict = {}
    for path, value in flat.items():
        *parents, leaf = path.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    return tree


def params_from_tensors(cfg: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our parameters from checkpoint tensors; checks every source's shape on the way."""
    flat = {}
    for path, rule in families.tensor_plan(cfg).items():
        arrays = [tensors[name] for name in rule.sources]
        assert [a.shape for a in arrays] == rules.rule_shapes(rule.rule, cfg, path), path
        flat[path] = rules.apply(rule.rule, cfg, arrays)
        assert flat[path].shape == rules.param_shape(cfg, path), path
    return flat


def load_golden(name: str) -> Golden:
    folder = GOLDEN / name
    cfg = families.config_from_hf(json.loads((folder / "config.json").read_text()))
    with np.load(folder / "logits.npz") as data:
        ids, logits = data["input_ids"], data["logits"]
    flat = params_from_tensors(cfg, load_file(folder / "model.safetensors"))
    return Golden(name, cfg, flat, ids, logits, max_len=len(ids))


GOLDEN_NAMES = sorted(p.parent.name for p in GOLDEN.glob("*/logits.npz"))


@pytest.fixture(scope="session", params=GOLDEN_NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return load_golden(request.param)


@pytest.fixture(scope="session")
def golden_named():
    return load_golden


JUNK = 37.0  # what unused pages hold: finite, and far from any key or value


class PagedSession:
    """Sequences of one model in a paged pool, with the least of a scheduler: shuffled pages, pages behind a window
    freed, overwritten with junk and handed out again. Every sequence is a prefix of the golden input."""

    def __init__(self, golden: Golden, cfg: ModelConfig | None = None, page_size: int = 4, sequences: int = 1) -> None:
        self.golden, self.cfg, self.page_size = golden, cfg or golden.cfg, page_size
        self.model = Decoder(self.cfg, jnp.dtype(jnp.float32), golden.max_len)
        self.params = golden.params
        self.groups = self.cfg.cache_groups()
        self.width = -(-len(golden.ids) // page_size) + 1
        num_pages = (sequences * self.width + 1,) * len(self.groups)
        pool = abstract_pool(self.cfg, num_pages, page_size, jnp.dtype(jnp.float32))
        self.pool = jax.tree.map(lambda s: jnp.full(s.shape, JUNK, s.dtype), pool)
        rng = np.random.default_rng(0)
        self.free = [list(rng.permutation(np.arange(1, n))) for n in num_pages]
        self.owned: dict[tuple[int, int], dict[int, int]] = {}  # (sequence, group) to page index to page
        self.computed = dict.fromkeys(range(sequences), 0)
        self._forward = jax.jit(self._logits)
        self._spoil = jax.jit(lambda pool, layer_pages: jax.tree.map(lambda x, p: x.at[p].set(JUNK), pool, layer_pages))

    def _logits(self, params, tokens, pool, rows):
        x, pool = self.model.apply({"params": params}, tokens, pool, rows)
        return self.model.apply({"params": params}, x, method=Decoder.unembed), pool

    def step(self, *rectangles: tuple[int, list[tuple[int, int] | None]]) -> None:
        """Each rectangle: queries per row, and per row ``(sequence, tokens to compute)`` or None for a masked row.
        Compares the logits of every computed token with the reference."""
        ids, tokens, rows, expected = self.golden.ids, [], [], []
        for width, entries in rectangles:
            positions = np.full((len(entries), width), -1, np.int32)
            row_tokens = np.zeros((len(entries), width), np.int32)
            for n, entry in enumerate(entries):
                if entry is not None:
                    seq, count = entry
                    start = self.computed[seq]
                    positions[n, :count] = np.arange(start, start + count)
                    row_tokens[n, :count] = ids[start : start + count]
            pages = tuple(self._pages(g, entries) for g in range(len(self.groups)))
            rows.append(QueryRows(jnp.asarray(positions), pages))
            tokens.append(row_tokens.ravel())
            expected.append(positions.ravel())
        for _, entries in rectangles:
            for seq, count in filter(None, entries):
                self.computed[seq] += count
        logits, self.pool = self._forward(self.params, np.concatenate(tokens), self.pool, tuple(rows))
        position = np.concatenate(expected)
        np.testing.assert_allclose(
            logits[position >= 0], self.golden.logits[position[position >= 0]], atol=1e-4, rtol=0
        )

    def _pages(self, g: int, entries: list[tuple[int, int] | None]) -> GroupPages:
        window = self.groups[g].window
        table, base = np.zeros((len(entries), self.width), np.int32), np.zeros(len(entries), np.int32)
        for n, entry in enumerate(entries):
            if entry is None:
                continue
            seq, count = entry
            start = self.computed[seq]
            owned = self.owned.setdefault((seq, g), {})
            first = 0 if window is None else max(0, start - window + 1) // self.page_size
            for index in [i for i in owned if i < first]:
                page = owned.pop(index)
                self._overwrite(g, page)
                self.free[g].insert(0, page)
            for index in range(first, (start + count - 1) // self.page_size + 1):
                if index not in owned:
                    owned[index] = self.free[g].pop(0)
                table[n, index - first] = owned[index]
            base[n] = first
        return GroupPages(jnp.asarray(table), jnp.asarray(base))

    def _overwrite(self, g: int, page: int) -> None:
        layers = self.groups[g].layers
        where = tuple(jnp.int32(page if i in layers else 0) for i in range(self.cfg.num_layers))
        self.pool = self._spoil(self.pool, type(self.pool)(where, where))


@pytest.fixture(scope="session")
def paged_session():
    return PagedSession
