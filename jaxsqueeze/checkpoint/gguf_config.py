"""GGUF metadata to the vocabulary of Hugging Face's ``config.json``, for each architecture that can be read.

What the metadata leaves out (Gemma's attention scale, the period of its windows) is a constant of the architecture,
written down here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxsqueeze.checkpoint.source import SourceError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_KNOWN = ", ".join(ARCHITECTURES)
_LLAMA3_TRAINED_LEN = 8192


class _Fields:
    """Metadata under the architecture's own prefix."""

    def __init__(self, path: object, metadata: Mapping[str, Any], architecture: str):
        self._path, self._metadata, self._prefix = path, metadata, architecture

    def get(self, key: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise SourceError(f"{self._path}: {self._prefix}.{key} differs between layers, which is not supported")
            value = value[0].item()
        return value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise SourceError(f"{self._path}: metadata lacks {self._prefix}.{key}; convert it again with llama.cpp")
        return value


def hf_config(
    path: object, metadata: Mapping[str, Any], tables: Mapping[str, np.ndarray], *, vocab_size: int, tied: bool
) -> dict[str, Any]:
    """``config.json`` as the model's authors would have written it.

    ``tables``: the file's rope tables by tensor name; ``vocab_size``: rows of the embedding; ``tied``: the file has
    no output matrix of its own.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise SourceError(f"{path}: unknown GGUF architecture {architecture!r}; known: {_KNOWN}")
    f = _Fields(path, metadata, architecture)
    if f.get("expert_count"):
        raise SourceError(f"{path}: mixture-of-experts {architecture} is an unknown architecture; known: {_KNOWN}")
    heads, hidden = f.need("attention.head_count"), f.need("embedding_length")
    head_dim = f.get("attention.key_length") or hidden // heads
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": f.need("feed_forward_length"),
        "num_hidden_layers": f.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": f.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": f.need("context_length"),
        "rms_norm_eps": f.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": f.get("rope.freq_base", 10_000.0),
        "partial_rotary_factor": f.get("rope.dimension_count", head_dim) / head_dim,
        "rope_scaling": _rope_scaling(path, f, tables, head_dim),
        "tie_word_embeddings": tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    window = f.get("attention.sliding_window")
    extra = {
        "llama": lambda: _llama(window),
        "qwen2": lambda: {"use_sliding_window": False},
        "qwen3": lambda: {"use_sliding_window": False},
        "smollm3": lambda: {"use_sliding_window": False},
        "gemma2": lambda: _gemma2(f, config),
        "gemma3": lambda: _gemma3(f, config),
        "phi3": lambda: {
            "sliding_window": window or None,
            "original_max_position_embeddings": f.get("rope.scaling.original_context_length")
            or config["max_position_embeddings"],
        },
    }[architecture]()
    return {**config, **extra}


def _llama(window: int | None) -> dict[str, Any]:
    """Mistral travels as ``llama`` too; its window, where written, makes the difference."""
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window} if window else {}


def _gemma2(f: _Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    # The 27B model alone scales by hidden / heads instead of head_dim.
    scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": scalar if config["num_hidden_layers"] == 46 else config["head_dim"],
        "sliding_window": f.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": f.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": f.get("final_logit_softcapping", 30.0),
    }


def _gemma3(f: _Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": scalar if config["num_hidden_layers"] == 62 else config["head_dim"],
        "sliding_window": f.need("attention.sliding_window"),
        "sliding_window_pattern": f.get("attention.sliding_window_pattern", 6),
        "rope_theta": f.get("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": f.get("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": f.get("final_logit_softcapping"),
    }


def _rope_scaling(path: object, f: _Fields, tables: Mapping[str, np.ndarray], head_dim: int) -> dict[str, Any] | None:
    kind = f.get("rope.scaling.type")
    context = f.need("context_length")
    original = f.get("rope.scaling.original_context_length") or context
    if "rope_freqs.weight" in tables:
        return _divisors(tables["rope_freqs.weight"], f.get("rope.freq_base", 10_000.0), head_dim, context)
    if "rope_factors_long.weight" in tables:
        return {
            "rope_type": "longrope",
            "long_factor": tables["rope_factors_long.weight"].tolist(),
            "short_factor": tables["rope_factors_short.weight"].tolist(),
            "original_max_position_embeddings": original,
            "attention_factor": f.get("rope.scaling.attn_factor"),
        }
    if kind in (None, "none", "longrope"):  # longrope without tables: the short context model of its pair
        linear = f.get("rope.scale_linear")
        return {"rope_type": "linear", "factor": linear} if kind is None and linear else None
    factor = f.need("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        betas = {f"beta_{end}": f.get(f"rope.scaling.yarn_beta_{end}") for end in ("fast", "slow")}
        yarn |= {key: value for key, value in betas.items() if value is not None}
        if attn_factor := f.get("rope.scaling.yarn_attn_factor"):
            # llama.cpp multiplies it with the paper's own scale, Hugging Face's field replaces that.
            yarn["attention_factor"] = attn_factor * (0.1 * np.log(factor) + 1.0)
        return yarn
    raise SourceError(f"{path}: unsupported rope type {kind!r}; supported: none, linear, yarn, longrope, llama3")


def _divisors(divisors: np.ndarray, theta: float, head_dim: int, context: int) -> dict[str, Any]:
    """``rope_freqs`` divides each frequency. Llama 3 makes it from four numbers, which are recovered where they
    reproduce the table; any other table is a longrope whose two tables are equal."""
    llama3 = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _LLAMA3_TRAINED_LEN,
    }
    if divisors.shape == (head_dim // 2,) and np.allclose(
        divisors, llama3_divisors(theta, head_dim, llama3["factor"], 1.0, 4.0, _LLAMA3_TRAINED_LEN), rtol=1e-4
    ):
        return llama3
    table = divisors.tolist()
    return {
        "rope_type": "longrope",
        "long_factor": table,
        "short_factor": table,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def llama3_divisors(
    theta: float, rotary_dim: int, factor: float, low: float, high: float, trained_len: int
) -> np.ndarray:
    """What Llama 3.1 divides each of its rotary frequencies by (Llama 3 herd of models, 2024)."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    smooth = (trained_len / wavelength - low) / (high - low)
    blended = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength > trained_len / low, factor, np.where(wavelength < trained_len / high, 1.0, blended))
