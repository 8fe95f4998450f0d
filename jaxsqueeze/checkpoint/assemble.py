"""From a TensorSource to our parameters: checks everything that can be known without reading weights, then builds one
unit (embedding, one layer, head) at a time."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from jaxsqueeze.checkpoint import layout
from jaxsqueeze.checkpoint.source import SourceError, TensorSource
from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.families import TensorRule, config_from_hf, rules, tensor_plan, units
from jaxsqueeze.quant import qtensor
from jaxsqueeze.quant.qtensor import QTensor
from jaxsqueeze.quant.scheme import Scheme

# Tensors some checkpoints carry although they follow from the config, or belong to parts that are not text.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq|.*\.(masked_bias|rotary_pos_emb.*)")
_LAYER = re.compile(r"model\.layers\.(\d+)\..*")


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked conversion: nothing about the source's names and shapes can fail any more."""

    source: TensorSource
    config: ModelConfig
    plan: dict[str, TensorRule]
    tokenizer_files: dict[str, bytes]
    stored: dict[str, Scheme]  # of the parameters that the source has quantised, all their tensors alike
    mixed: tuple[str, ...]  # those whose tensors have different schemes: they can only be expanded

    @property
    def units(self) -> list[str]:
        return units(self.config)

    def paths(self, unit: str) -> list[str]:
        return [path for path in self.plan if path.startswith(f"{unit}/")]

    def nbytes(self, dtype: np.dtype, schemes: Mapping[str, Scheme], unit: str | None = None) -> int:
        """Bytes of the stored parameters of one unit, or of all."""
        paths = self.plan if unit is None else self.paths(unit)
        return sum(layout.nbytes(self.config, path, dtype, schemes) for path in paths)


def prepare(source: TensorSource) -> Job:
    """Reads settings, names and shapes, and refuses what cannot be converted; reads no weights."""
    try:
        config = config_from_hf(source.hf_config)
    except ValueError as error:
        raise SourceError(f"{source.path}: {error}") from error
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise SourceError(
            f"{source.path}: its config has a value of a wrong kind ({error}); download it again"
        ) from error
    tokenizer_files = source.tokenizer_files()
    config = dataclasses.replace(config, eos_token_ids=_eos_ids(config, source, tokenizer_files))
    plan = tensor_plan(config)
    names = set(source.names())
    for path, rule in plan.items():
        for name, expected in zip(rule.sources, rules.rule_shapes(rule.rule, config, path), strict=True):
            if name not in names:
                raise SourceError(_missing(source, config, name))
            if source.shape(name) != expected:
                raise SourceError(
                    f"{source.where(name)}: tensor {name!r} has shape {list(source.shape(name))}, but the config asks "
                    f"for {list(expected)}; use config and weights of the same model"
                )
    used = {name for rule in plan.values() for name in rule.sources}
    for name in sorted(names - used):
        layer = _LAYER.fullmatch(name)
        if layer and int(layer[1]) < config.num_layers and not _DERIVED.fullmatch(name):
            if _is_empty_bias(source, name, names):
                continue
            raise SourceError(
                f"{source.where(name)}: tensor {name!r} has no place in a {config.family} model with this config; "
                "use config and weights of the same model"
            )
    return Job(source, config, plan, tokenizer_files, *_stored(source, plan))


def build_unit(job: Job, unit: str, dtype: np.dtype, schemes: Mapping[str, Scheme]) -> dict[str, Any]:
    """The nested stored arrays of one unit (without the unit's own name): see layout.py. Codes that the source has in
    the scheme that is asked for are taken as they are."""
    params: dict[str, Any] = {}
    for path in job.paths(unit):
        scheme = schemes.get(path)
        if scheme is None:
            params[path] = build(job, path, rules.stored_dtype(path, dtype))
        elif scheme == job.stored.get(path):
            params[path] = _build_stored(job, path).arrays
        else:
            params[path] = qtensor.quantise_on_host(build(job, path, np.dtype(np.float32)), scheme).arrays
    return unflatten_dict(params, sep="/")[unit]


def build(job: Job, path: str, dtype: np.dtype) -> np.ndarray:
    """The parameter at ``path`` in ``dtype``."""
    rule = job.plan[path]
    value = rules.apply(rule.rule, job.config, [job.source.get(name, dtype) for name in rule.sources])
    assert (value.shape, value.dtype) == (rules.param_shape(job.config, path), dtype), path
    return value


def _build_stored(job: Job, path: str) -> QTensor:
    """The parameter at ``path`` from its sources' codes: rules rearrange outputs, so scales and zeros follow."""
    rule, shape = job.plan[path], rules.param_shape(job.config, path)
    parts = [job.source.quantised(name) for name in rule.sources]
    first = parts[0]
    for name, part in zip(rule.sources[1:], parts[1:], strict=True):
        if first.order is not None and not np.array_equal(part.order, first.order):
            raise SourceError(
                f"{job.source.where(name)}: {name!r} and {rule.sources[0]!r} have their inputs in different orders "
                "(desc_act), but are one weight here; choose --weights bf16 or int4"
            )

    def outputs(arrays: list[np.ndarray]) -> np.ndarray:
        """Of arrays [outputs, ...]."""
        return rules.apply(rule.rule, job.config, arrays).reshape(-1, *arrays[0].shape[1:])

    def scales(name: str) -> np.ndarray | None:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else np.ascontiguousarray(outputs([a.T for a in arrays]).T)

    codes = outputs([part.codes for part in parts])
    return QTensor(codes, scales("scales"), scales("zeros"), first.format, shape, first.order)


def _stored(source: TensorSource, plan: Mapping[str, TensorRule]) -> tuple[dict[str, Scheme], tuple[str, ...]]:
    """``Job.stored`` and ``Job.mixed``."""
    stored, mixed = {}, []
    for path, rule in plan.items():
        schemes = {source.scheme(name) for name in rule.sources if path.endswith("/weight")}
        if len(schemes) > 1:
            mixed.append(path)
        elif (scheme := next(iter(schemes), None)) is not None:
            stored[path] = scheme
    return stored, tuple(mixed)


def _is_empty_bias(source: TensorSource, name: str, names: set[str]) -> bool:
    """AutoGPTQ writes a bias for every quantised layer, of zeros where the model has none."""
    weight = f"{name.removesuffix('.bias')}.weight"
    if not name.endswith(".bias") or weight not in names or source.scheme(weight) is None:
        return False
    return not np.any(source.get(name, np.dtype(np.float32)))


def _missing(source: TensorSource, config: ModelConfig, name: str) -> str:
    if name == "lm_head.weight":
        return (
            f"{source.path}: tensor {name!r} is missing and the config does not tie it to the embedding "
            "(tie_word_embeddings is false); use a complete checkpoint"
        )
    return (
        f"{source.path}: tensor {name!r} is missing from the weights; download the complete {config.family} checkpoint"
    )


def _eos_ids(config: ModelConfig, source: TensorSource, tokenizer_files: Mapping[str, bytes]) -> tuple[int, ...]:
    """Union of what generation_config, config and tokenizer call end of sequence: each of them may be the only one
    that is right."""
    given = source.generation_config.get("eos_token_id")
    ids = {*config.eos_token_ids, *([given] if isinstance(given, int) else given or [])}
    ids |= _tokenizer_eos(source.path, tokenizer_files)
    return tuple(sorted(i for i in ids if 0 <= i < config.vocab_size))


def _tokenizer_eos(path: Path, files: Mapping[str, bytes]) -> set[int]:
    def parse(name: str) -> dict[str, Any]:
        try:
            return json.loads(files.get(name, b"{}"))
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{path}: {name} is not valid JSON ({error}); download it again") from error

    settings = parse("tokenizer_config.json")
    token = settings.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if not token or "tokenizer.json" not in files:
        return set()
    tokenizer = parse("tokenizer.json")
    for added in tokenizer.get("added_tokens", []):
        if added["content"] == token:
            return {added["id"]}
    vocab = tokenizer["model"]["vocab"]
    return {vocab[token]} if isinstance(vocab, dict) and token in vocab else set()
