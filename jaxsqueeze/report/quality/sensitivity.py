"""What each quantised weight costs: the KL to the reference when only this one is quantised.

The reference reads a few hundred tokens once, layer by layer, and its hidden states before every layer are kept. For a
weight of layer i the blocks run from layer i on, that one weight replaced: half the model on average, and equal layers
share a compiled block. Costs of weights nearly add up where they are small, so they tell which to store wider.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from jaxsqueeze.checkpoint import layout
from jaxsqueeze.checkpoint.calibration.fold import MAKERS
from jaxsqueeze.checkpoint.manifest import read_manifest
from jaxsqueeze.checkpoint.source import DTYPES, Report, quiet
from jaxsqueeze.checkpoint.store import load_params
from jaxsqueeze.config import PREFILL_ROW, KVDtypes
from jaxsqueeze.models.config import LayerConfig, ModelConfig
from jaxsqueeze.models.decoder import Block, Decoder, Variables
from jaxsqueeze.models.rope import cos_sin
from jaxsqueeze.report.quality.scoring import Subject, query_rows
from pallas_kernels.target import Target


@dataclasses.dataclass(frozen=True)
class WeightCost:
    """KL, nats, over the tokens that were read, when nothing but the weights at ``paths`` is quantised."""

    name: str  # the path of one weight, or what the paths of several begin with
    paths: tuple[str, ...]
    scheme: str
    num_bytes: int
    kl_mean: float
    kl_p99: float


def weight_costs(
    candidate: Path, reference: Path, tokens: np.ndarray, folded: bool, report: Report = quiet
) -> list[WeightCost]:
    """The costs of ``candidate``'s quantised weights, worst first. Both are converted folders of one model, ``tokens``
    i32[n] are read as one window. ``folded``: scales were moved between the weights of an attention or MLP and its norm
    (checkpoint/calibration/fold.py), so that only all of these together stand for those of ``reference``."""
    manifest = read_manifest(candidate)
    schemes = manifest.schemes
    params = flatten_dict(load_params(candidate), is_leaf=lambda keys, _: "/".join(keys) in schemes, sep="/")
    parts: dict[str, list[str]] = {}
    for path in schemes:
        parts.setdefault("/".join(path.split("/")[:2]) if folded else path, []).append(path)
    walk = _Walk(Subject.load(reference, len(tokens), KVDtypes()), tokens)
    found = []
    for done, (name, paths) in enumerate(parts.items()):
        report("each weight", done, len(parts))
        replaced = {path: x for path, x in params.items() if path in paths or (folded and _made_for(path, name))}
        kl = walk.kl_with(replaced)
        num_bytes = sum(layout.nbytes(manifest.config, path, DTYPES[manifest.dtype], schemes) for path in paths)
        stored = ", ".join(dict.fromkeys(str(schemes[path]) for path in paths))
        mean, p99 = float(kl.mean(dtype=np.float64)), float(np.quantile(kl, 0.99))
        found.append(WeightCost(name, tuple(paths), stored, num_bytes, mean, p99))
    report("each weight", len(parts), len(parts))
    return sorted(found, key=lambda cost: -cost.kl_mean)


def _made_for(path: str, block: str) -> bool:
    """Whether the parameter at ``path`` belongs to ``block``, an attention or MLP like ``layers_0/mlp``, or is its
    norm."""
    layer, _, part = block.partition("/")
    norms = {f"{layer}/{maker}/scale" for name, maker in MAKERS.items() if name.startswith(f"{part}/")}
    return path.startswith(f"{block}/") or path in norms


class _Walk:
    """A reference on one window, every layer's input kept."""

    def __init__(self, subject: Subject, tokens: np.ndarray) -> None:
        cfg, model = subject.manifest.config, subject.model
        self._subject, self._num_tokens = subject, len(tokens)
        padded = np.zeros(-(-len(tokens) // PREFILL_ROW) * PREFILL_ROW, np.int32)
        padded[: len(tokens)] = tokens
        places = np.arange(len(padded), dtype=np.int32)
        self._tokens = padded
        self._rows = query_rows(subject, np.where(places < len(tokens), places, -1).reshape(-1, PREFILL_ROW))
        self._ropes = [cos_sin(rope, model.max_len, jnp.asarray(places)) for rope in cfg.ropes]
        self._inputs = [_embed(model, subject.variables, padded)]  # of layer i; the last: of the final norm
        for i in range(cfg.num_layers):
            self._inputs.append(self._run(i, subject.variables, self._inputs[i]))
        self._reference = _blockwise(_log_softmax, model, subject.variables, self._inputs[-1])

    def kl_with(self, replaced: Mapping[str, Any]) -> np.ndarray:
        """f32[n]: KL at each token with other parameters, by path, all of one unit."""
        subject, layers = self._subject, self._subject.manifest.config.num_layers
        flat = flatten_dict(subject.variables["params"], sep="/")
        variables = {**subject.variables, "params": unflatten_dict({**flat, **replaced}, sep="/")}
        (unit,) = {path.split("/")[0] for path in replaced}
        if unit.startswith("layers_"):
            first = int(unit.removeprefix("layers_"))
            x_TH = self._inputs[first]
        else:
            first = 0 if unit == "embed" else layers
            x_TH = _embed(subject.model, variables, self._tokens) if unit == "embed" else self._inputs[layers]
        for i in range(first, layers):
            x_TH = self._run(i, variables, x_TH)
        kl_T = _blockwise(_kl, subject.model, variables, x_TH, self._reference)
        return np.asarray(kl_T)[: self._num_tokens]

    def _run(self, i: int, variables: Variables, x_TH: jax.Array) -> jax.Array:
        subject, unit = self._subject, f"layers_{i}"
        cfg, model = subject.manifest.config, subject.model
        group = next(g for g, group in enumerate(cfg.cache_groups()) if i in group.layers)
        own = {kind: tree[unit] for kind, tree in variables.items() if unit in tree}
        block = _block(cfg, cfg.layers[i], group, model.dtype, model.target)
        return block(own, x_TH, subject.pool.k[i], subject.pool.v[i], (self._rows,), self._ropes)


@functools.lru_cache
def _block(
    cfg: ModelConfig, layer: LayerConfig, group: int, dtype: jnp.dtype, target: Target
) -> Callable[..., jax.Array]:
    """A layer on an empty pool: its output [T, H]."""
    block = Block(cfg, layer, group, dtype, target, parent=None)
    return jax.jit(lambda *args: block.apply(*args)[0])


@functools.partial(jax.jit, static_argnums=0)
def _embed(model: Decoder, variables: Variables, tokens_T: jax.Array) -> jax.Array:
    def embed(model: Decoder) -> jax.Array:
        x_TH = model.embed(tokens_T)
        return x_TH if model.cfg.embed_scale == 1.0 else x_TH * jnp.asarray(model.cfg.embed_scale, model.dtype)

    return model.apply(variables, method=embed)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _blockwise(
    score: Callable[..., jax.Array], model: Decoder, variables: Variables, *arrays_T: jax.Array
) -> jax.Array:
    """``score`` of a few tokens at a time: its temporaries are as wide as the vocabulary."""
    blocks = jax.tree.map(lambda x: x.reshape(-1, PREFILL_ROW, *x.shape[1:]), arrays_T)
    found = lax.map(lambda block: score(model, variables, *block), blocks)
    return found.reshape(-1, *found.shape[2:])


def _log_softmax(model: Decoder, variables: Variables, x_TH: jax.Array) -> jax.Array:
    def unembed(model: Decoder) -> jax.Array:
        return model.unembed(model.final_norm(x_TH))

    return jax.nn.log_softmax(model.apply(variables, method=unembed))


def _kl(model: Decoder, variables: Variables, x_TH: jax.Array, ref_TV: jax.Array) -> jax.Array:
    p = jnp.exp(ref_TV)
    return jnp.sum(jnp.where(p > 0, p * (ref_TV - _log_softmax(model, variables, x_TH)), 0.0), axis=-1)
