"""What a request must answer, from the checkpoint's own tensors: a dense float64 forward pass in numpy, and the
sampling rules applied one row at a time.

No page, no batch, no cache, and none of the engine's code. Gumbel noise alone comes from ``jax.random``, by the rule
that the engine documents: the key of the request's seed, folded with the token's absolute position.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxsqueeze.types import SamplingParams


class DenseOracle:
    """``hf``: the checkpoint's config.json, Llama-shaped, with SmolLM3's ``layer_types`` and ``no_rope_layers``."""

    def __init__(self, hf: Mapping[str, Any], tensors: Mapping[str, np.ndarray], eos_ids: Sequence[int] = ()) -> None:
        self._hf = hf
        self._w = {name: x.astype(np.float64) for name, x in tensors.items()}
        self._eos_ids = tuple(eos_ids)
        self.compile()

    def compile(self) -> None:
        """Compiles the noise (again, if jax's caches were cleared): not while an engine is watched for compilations."""
        _noise.__wrapped__(0, 0, self._hf["vocab_size"])

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """f64[T, V]."""
        hf, w = self._hf, self._w
        x = w["model.embed_tokens.weight"][list(ids)]
        for i in range(hf["num_hidden_layers"]):
            name = f"model.layers.{i}."
            y = self._norm(x, w[name + "input_layernorm.weight"])
            x = x + self._attention(y, i) @ w[name + "self_attn.o_proj.weight"].T
            y = self._norm(x, w[name + "post_attention_layernorm.weight"])
            gate = y @ w[name + "mlp.gate_proj.weight"].T
            up = y @ w[name + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[name + "mlp.down_proj.weight"].T
        return self._norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T

    def log_softmax(self, ids: Sequence[int]) -> np.ndarray:
        """f64[T, V]."""
        return log_softmax(self.logits(ids))

    def answer(self, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams) -> list[int]:
        """The token that follows each prefix of ``tokens``; equal to ``tokens`` if all of them are right.

        ``sampling`` has a seed unless it is greedy.
        """
        logits = self.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self._eos_ids))
        return [choose(x, prompt, tokens[:i], sampling, stops) for i, x in enumerate(logits)]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """``count`` greedy tokens."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def _norm(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self._hf["rms_norm_eps"]) * scale

    def _attention(self, x: np.ndarray, layer: int) -> np.ndarray:
        hf, length = self._hf, len(x)
        heads, kv_heads, dim = hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"]
        q, k, v = (
            (x @ self._w[f"model.layers.{layer}.self_attn.{p}_proj.weight"].T).reshape(length, n, dim)
            for p, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if hf["no_rope_layers"][layer]:
            q, k = self._rotate(q), self._rotate(k)
        position = np.arange(length)
        seen = position[:, None] >= position
        if hf["layer_types"][layer] == "sliding_attention":
            seen &= position[:, None] - position < hf["sliding_window"]
        out = np.empty((length, heads, dim))
        for head in range(heads):
            mine = head * kv_heads // heads
            scores = np.where(seen, q[:, head] @ k[:, mine].T / np.sqrt(dim), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, mine]
        return out.reshape(length, heads * dim)

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        turns = np.arange(len(x))[:, None] * self._hf["rope_theta"] ** (-np.arange(half) / half)
        cos, sin = np.cos(turns)[:, None], np.sin(turns)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def choose(logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], s: SamplingParams, stops: set[int]) -> int:
    """The next token of one sequence, in the order that SamplingParams documents."""
    x = logits.copy()
    for token, bias in s.logit_bias:
        x[token] += bias
    for word in s.bad_words_ids:
        head = list(word[:-1])
        if len(output) >= len(head) and list(output[len(output) - len(head) :]) == head:
            x[word[-1]] = -np.inf
    if len(output) < s.min_tokens:
        x[list(stops)] = -np.inf
    for token in set(prompt) | set(output):
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(output):
        x[token] -= s.frequency_penalty * list(output).count(token) + s.presence_penalty
    if s.temperature == 0:
        return int(x.argmax())
    x = x / s.temperature
    if 0 < s.top_k < len(x):
        x[x < np.sort(x)[-s.top_k]] = -np.inf
    p = np.exp(log_softmax(x))
    if s.top_p < 1:
        order = np.argsort(-p)
        outside = order[np.cumsum(p[order]) - p[order] >= s.top_p]
        x[outside] = -np.inf
    x[p < s.min_p * p.max()] = -np.inf
    assert s.seed is not None
    return int((x + _noise(s.seed % 2**64, len(prompt) + len(output), len(x))).argmax())


@functools.lru_cache(maxsize=4096)
def _noise(seed: int, position: int, size: int) -> np.ndarray:
    key = jax.random.wrap_key_data(np.array([seed >> 32, seed % 2**32], np.uint32))
    return np.asarray(jax.random.gumbel(jax.random.fold_in(key, position), (size,)), np.float64)
