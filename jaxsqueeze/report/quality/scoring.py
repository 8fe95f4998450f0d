"""Teacher-forced scores of two models on the same tokens, through the paged pool as served.

Both models see each token of a window after the same tokens before it, written to KV pages by chunks of prefill. Only
a few numbers a position leave the device: the vocabulary's distributions are compared where they are.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxsqueeze.checkpoint.manifest import Manifest, read_manifest
from jaxsqueeze.checkpoint.source import Report, quiet
from jaxsqueeze.checkpoint.store import load_params
from jaxsqueeze.config import PREFILL_ROW, KVDtypes
from jaxsqueeze.kv.pool import KVPool, abstract_pool, allocate, storage
from jaxsqueeze.models.attention import GroupPages, QueryRows
from jaxsqueeze.models.decoder import Decoder, Variables
from jaxsqueeze.runner.views import with_views
from pallas_kernels.target import Target

PAGE = 16
ROWS = 8  # of PREFILL_ROW tokens a step


@struct.dataclass
class Scores:
    """One entry a predicted token, f32 or i32[n]. Logarithms are natural."""

    ref_nll: jax.Array  # -log p of the token that follows
    nll: jax.Array
    kl: jax.Array  # sum over the vocabulary of p_ref (log p_ref - log p)
    ref_top: jax.Array  # the most likely token
    top: jax.Array
    ref_sure: jax.Array  # its probability


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model ready to be scored on windows of up to ``length`` tokens."""

    manifest: Manifest
    model: Decoder
    variables: Variables
    pool: KVPool
    pages: int  # columns of its tables

    @classmethod
    def load(cls, folder: Path, length: int, kv: KVDtypes, report: Report = quiet) -> Subject:
        """Raises SourceError for a damaged folder, ValueError for KV that the model cannot have."""
        manifest = read_manifest(folder)
        cfg, dtype, target = manifest.config, jnp.dtype(manifest.dtype), Target.of(jax.devices()[0])
        params = load_params(folder, report=report)
        pages = -(-length // PAGE)
        counts = (pages + 1,) * len(cfg.cache_groups())
        pool = allocate(abstract_pool(cfg, counts, PAGE, storage(kv, dtype, jax.default_backend())))
        return cls(manifest, Decoder(cfg, dtype, length, target), with_views(params), pool, pages)


class Comparison:
    """Scores windows with a reference and a candidate. Their pools are reused from window to window."""

    def __init__(self, reference: Subject, candidate: Subject) -> None:
        self._subjects = reference, candidate
        self._models = reference.model, candidate.model
        self._pools = reference.pool, candidate.pool

    def score(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """``Scores`` of a window's tokens 1 .. n - 1, as numpy arrays by field name. Raises FloatingPointError if a
        model's logits are not finite."""
        fields = dataclasses.fields(Scores)
        parts: list[dict[str, np.ndarray]] = []
        step = ROWS * PREFILL_ROW
        for start in range(0, len(tokens), step):
            chunk = tokens[start : start + step + 1]
            shape = ROWS, PREFILL_ROW
            padded, targets = np.zeros(step, np.int32), np.zeros(step, np.int32)
            padded[: len(chunk[:step])] = chunk[:step]
            targets[: len(chunk) - 1] = chunk[1:]
            positions = np.where(np.arange(step) < len(chunk[:step]), start + np.arange(step), -1).astype(np.int32)
            rows = tuple(query_rows(s, positions.reshape(shape)) for s in self._subjects)
            variables = tuple(s.variables for s in self._subjects)
            self._pools, scores = _step(self._models, variables, self._pools, padded, rows, targets)
            parts.append({f.name: np.asarray(getattr(scores, f.name))[: len(chunk) - 1] for f in fields})
        whole = {f.name: np.concatenate([part[f.name] for part in parts]) for f in fields}
        if not all(np.isfinite(whole[name]).all() for name in ("ref_nll", "nll", "kl")):
            raise FloatingPointError("a model's logits are not finite")
        return whole


def query_rows(subject: Subject, positions: np.ndarray) -> QueryRows:
    """Of ``positions`` i32[N, Q]. Every group's table holds all pages, 1, 2, ..., in order."""
    n = len(positions)
    table = np.broadcast_to(np.arange(1, subject.pages + 1, dtype=np.int32), (n, subject.pages))
    pages = GroupPages(table, np.zeros(n, np.int32))
    return QueryRows(positions, (pages,) * len(subject.manifest.config.cache_groups()))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _step(
    models: tuple[Decoder, Decoder],
    variables: tuple[Any, Any],
    pools: tuple[KVPool, KVPool],
    tokens_T: jax.Array,
    rows: tuple[QueryRows, QueryRows],
    targets_T: jax.Array,
) -> tuple[tuple[KVPool, KVPool], Scores]:
    """Donates: pools."""
    hidden, written = zip(
        *(m.apply(v, tokens_T, p, (r,)) for m, v, p, r in zip(models, variables, pools, rows, strict=True)), strict=True
    )

    def score(block: tuple[jax.Array, ...]) -> Scores:
        """Of a few positions: logits of all of them would be the largest arrays by far."""
        targets, *states = block
        ref, cand = (
            jax.nn.log_softmax(m.apply(v, x, method=Decoder.unembed))
            for m, v, x in zip(models, variables, states, strict=True)
        )
        at = targets[:, None]
        p = jnp.exp(ref)
        return Scores(
            ref_nll=-jnp.take_along_axis(ref, at, axis=1)[:, 0],
            nll=-jnp.take_along_axis(cand, at, axis=1)[:, 0],
            kl=jnp.sum(jnp.where(p > 0, p * (ref - cand), 0.0), axis=1),
            ref_top=jnp.argmax(ref, axis=1),
            top=jnp.argmax(cand, axis=1),
            ref_sure=jnp.max(p, axis=1),
        )

    blocks = jax.tree.map(lambda x: x.reshape(ROWS, PREFILL_ROW, *x.shape[1:]), (targets_T, *hidden))
    return written, jax.tree.map(lambda x: x.reshape(-1), lax.map(score, blocks))
