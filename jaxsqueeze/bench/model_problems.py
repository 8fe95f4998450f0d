"""Which problems of which ops a served model's programs consist of: what is worth tuning for it.

One list from the configuration, without tracing a program; a test holds it to what the programs really ask for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import traverse_util

from jaxsqueeze.bench import random_model
from jaxsqueeze.config import PREFILL_ROW, EngineConfig, KVDtypes
from jaxsqueeze.kv.pool import storage
from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.quant.qtensor import QTensor
from jaxsqueeze.runner.buckets import Buckets
from jaxsqueeze.runner.steps import SCORE_ROWS
from jaxsqueeze.sched import table_width
from pallas_kernels.kv_write.problem import Problem as KVWrite
from pallas_kernels.kv_write.problem import format_of
from pallas_kernels.paged_attention.problem import Problem as Attention
from pallas_kernels.quant_matmul.problem import Format
from pallas_kernels.quant_matmul.problem import Problem as Matmul
from pallas_kernels.sample_topk.problem import Problem as Filter

Found = tuple[str, Any]  # op, problem


def problems(
    cfg: ModelConfig, config: EngineConfig, buckets: Buckets, max_model_len: int, weights: Format | None, dtype: str
) -> list[Found]:
    """Of all buckets on a GPU, each once. ``weights``: None if they are plain; ``dtype``: of activations, keys and
    values before they are stored. Raises ValueError for a ``config.kv_dtype`` that does not go with it."""
    found: dict[Found, None] = {}
    for B in buckets.decode:
        found |= dict.fromkeys(_step(cfg, config, max_model_len, weights, dtype, [(B, 1)], {B}))
    for B, N in buckets.mixed:
        logit_rows = {B + N, min(SCORE_ROWS, N * PREFILL_ROW)}
        rows = [(B, 1), (N, PREFILL_ROW)]
        found |= dict.fromkeys(_step(cfg, config, max_model_len, weights, dtype, rows, logit_rows))
        found["sample_topk", Filter(B + N, cfg.vocab_size)] = None
    found |= dict.fromkeys(("sample_topk", Filter(B, cfg.vocab_size)) for B in buckets.decode)
    return list(found)


def _step(
    cfg: ModelConfig,
    config: EngineConfig,
    max_model_len: int,
    weights: Format | None,
    dtype: str,
    rows: list[tuple[int, int]],
    logit_rows: set[int],
) -> Iterator[Found]:
    """Without sampling. ``rows``: (N, Q) of each attention; ``logit_rows``: of each product with the vocabulary."""
    c, T = cfg, sum(n * q for n, q in rows)
    stored = storage(KVDtypes.parse(config.kv_dtype), jnp.dtype(dtype), "gpu")
    kv_formats = format_of(stored.k, stored.values), format_of(stored.v, stored.values)
    for format in kv_formats:
        yield "kv_write", KVWrite(T, c.num_kv_heads, c.head_dim, config.page_size, dtype, format)
    for group in c.cache_groups():
        P = table_width(
            group,
            page_size=config.page_size,
            max_model_len=max_model_len,
            max_step_tokens=config.max_step_tokens,
            decode_steps=config.decode_steps,
        )
        heads = c.num_kv_heads, c.q_per_kv, c.head_dim, config.page_size
        for N, Q in rows:
            extras = {"scale": c.attn_scale, "window": group.window, "softcap": c.attn_softcap}
            yield "paged_attention", Attention(N, Q, *heads, P, dtype, *kv_formats, **extras)
    for path, weight in traverse_util.flatten_dict(random_model.abstract(c, jnp.dtype(dtype), weights)).items():
        if isinstance(weight, QTensor):
            for tokens in logit_rows if path[0] == "lm_head" else {T}:
                yield "quant_matmul", _matmul(weight, tokens, dtype)


def _matmul(weight: QTensor, T: int, dtype: str) -> Matmul:
    out, width = math.prod(weight.shape[:-1]), weight.shape[-1]
    grouped = weight.scales.ndim == 2
    return Matmul(
        T,
        out,
        width,
        dtype,
        weight.format,
        random_model.SCHEMES[weight.format].group if grouped else 0,
        weight.zeros is not None,
        weight.scales.dtype.name,
    )
