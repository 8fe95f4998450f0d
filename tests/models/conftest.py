"""Golden checkpoints, read without the checkpoint package (safetensors, tensor plan and rules only), and a paged
session that runs them and compares every logit with the reference."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxsqueeze.kv.pool import Pages, Storage, abstract_pool
from jaxsqueeze.models import families
from jaxsqueeze.models.attention import GroupPages, QueryRows
from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.decoder import Decoder
from jaxsqueeze.models.families import rules
from pallas_kernels.target import CPU

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


def from_tensors(name: str, hf: dict, tensors: dict[str, np.ndarray], ids: np.ndarray, logits: np.ndarray) -> Golden:
    cfg = families.config_from_hf(hf)
    return Golden(name, cfg, params_from_tensors(cfg, tensors), ids, logits, max_len=len(ids))


def load_golden(name: str) -> Golden:
    folder = GOLDEN / name
    with np.load(folder / "logits.npz") as data:
        ids, logits = data["input_ids"], data["logits"]
    hf = json.loads((folder / "config.json").read_text())
    return from_tensors(name, hf, load_file(folder / "model.safetensors"), ids, logits)


GOLDEN_NAMES = sorted(p.parent.name for p in GOLDEN.glob("*/logits.npz"))


@pytest.fixture(scope="session", params=GOLDEN_NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return load_golden(request.param)


@pytest.fixture(scope="session")
def golden_named():
    return load_golden


@pytest.fixture(scope="session")
def golden_from_tensors():
    return from_tensors


JUNK = 37.0  # what unused pages hold: finite, and far from any key or value
DECODE_ROWS = 3


@functools.cache
def forward(cfg: ModelConfig, max_len: int):
    """Jitted ``(params, tokens, pool, rows) -> (logits, pool)``; compiled for speed of compiling."""
    model = Decoder(cfg, jnp.dtype(jnp.float32), max_len, CPU)

    def logits(params, tokens, pool, rows):
        x, pool = model.apply({"params": params}, tokens, pool, rows)
        return model.apply({"params": params}, x, method=Decoder.unembed), pool

    return jax.jit(logits, compiler_options={"xla_backend_optimization_level": 0})


class PagedSession:
    """Sequences of one model in a paged pool, with the least of a scheduler: shuffled pages; pages behind a window
    are freed, overwritten with junk and handed out again. Every sequence is a prefix of the golden input.

    A step is one rectangle of one row, as wide as the input, and one of ``DECODE_ROWS`` single tokens, so all ways of
    feeding tokens share a compiled program.
    """

    def __init__(self, golden: Golden, cfg: ModelConfig | None = None, page_size: int = 4, sequences: int = 3) -> None:
        self.golden, self.cfg, self.page_size = golden, cfg or golden.cfg, page_size
        self.params = golden.params
        self.groups = self.cfg.cache_groups()
        self.width = -(-len(golden.ids) // page_size) + 1
        num_pages = (sequences * self.width + 1,) * len(self.groups)
        pool = abstract_pool(self.cfg, num_pages, page_size, Storage(*[jnp.dtype(jnp.float32)] * 3))
        self.pool = jax.tree.map(lambda s: jnp.full(s.shape, JUNK, s.dtype), pool)
        rng = np.random.default_rng(0)
        self.free = [list(rng.permutation(np.arange(1, n))) for n in num_pages]
        self.owned: dict[tuple[int, int], dict[int, int]] = {}  # (sequence, group) to page index to page
        self.computed = dict.fromkeys(range(sequences), 0)

    def step(self, chunk: tuple[int, int] | None, *decode: int | None) -> None:
        """``chunk``: (sequence, tokens to compute); ``decode``: sequences to advance by one token; None: a masked row.
        Compares the logits of every computed token with the reference."""
        singles = [None if seq is None else (seq, 1) for seq in decode]
        rectangles = [(len(self.golden.ids), [chunk]), (1, singles + [None] * (DECODE_ROWS - len(singles)))]
        tokens, rows = [], []
        for width, entries in rectangles:
            positions = np.full((len(entries), width), -1, np.int32)
            for n, entry in enumerate(entries):
                if entry is not None:
                    start = self.computed[entry[0]]
                    positions[n, : entry[1]] = np.arange(start, start + entry[1])
            pages = tuple(self._pages(g, entries) for g in range(len(self.groups)))
            rows.append(QueryRows(positions, pages))
            tokens.append(np.where(positions >= 0, self.golden.ids[positions], 0).ravel().astype(np.int32))
        for seq, count in (e for _, entries in rectangles for e in entries if e is not None):
            self.computed[seq] += count
        run = forward(self.cfg, self.golden.max_len)
        logits, self.pool = run(self.params, np.concatenate(tokens), self.pool, tuple(rows))
        position = np.concatenate([r.positions.ravel() for r in rows])
        live = position >= 0
        np.testing.assert_allclose(np.asarray(logits)[live], self.golden.logits[position[live]], atol=1e-4, rtol=0)

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
        return GroupPages(table, base)

    def _overwrite(self, g: int, page: int) -> None:
        k, v = list(self.pool.k), list(self.pool.v)
        for i in self.groups[g].layers:
            k[i], v[i] = _fill_page(k[i], page), _fill_page(v[i], page)
        self.pool = self.pool.replace(k=tuple(k), v=tuple(v))


@jax.jit
def _fill_page(pages: Pages, page: jax.Array) -> Pages:
    return jax.tree.map(lambda x: x.at[page].set(JUNK), pages)


@pytest.fixture(scope="session")
def paged_session():
    return PagedSession
