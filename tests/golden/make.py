"""Makes the golden checkpoints beside this file: tiny random models with the reference's own float32 logits.

Run ``python tests/golden/make.py [name ...]`` with the ``[parity]`` extra installed. Each folder holds the
``config.json`` and ``model.safetensors`` that transformers writes, and ``logits.npz`` with ``input_ids`` i64[T] and
``logits`` f32[T, V] of one eager forward pass.

Sizes are unsymmetric on purpose (KV heads != query heads, head_dim != hidden / heads where the family allows it,
scales != 1), norm weights and biases are random, windows and trained lengths are shorter than the input: a
transposed, skipped or mixed-up tensor cannot go unnoticed.
"""

from __future__ import annotations

import copy
import json
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers as hf

HERE = Path(__file__).parent
LENGTH = 37  # input tokens; not a multiple of any page or chunk size
SIZES = {
    "vocab_size": 89,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _rope(kind: str, **params: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 500.0, **params}


def _phi3(**extra: object) -> hf.Phi3Config:
    # Phi-3 has no head_dim of its own: 60 / 6 heads = 10, of which 8 rotate.
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 3.5, 5.0]}
    rope = _rope("longrope", partial_rotary_factor=0.8, **factors)
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"} | {"hidden_size": 60, "num_hidden_layers": 2}
    return hf.Phi3Config(**{**sizes, "rope_parameters": rope, **extra})


def configs() -> dict[str, hf.PreTrainedConfig]:
    full, local = "full_attention", "sliding_attention"
    gemma = {"tie_word_embeddings": True, "query_pre_attn_scalar": 20, "sliding_window": 5}
    return {
        "llama": hf.LlamaConfig(**SIZES),
        "llama_llama3": hf.LlamaConfig(
            **SIZES,
            rope_parameters=_rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=48
            ),
        ),
        "llama_linear": hf.LlamaConfig(
            **SIZES, attention_bias=True, mlp_bias=True, rope_parameters=_rope("linear", factor=2.5)
        ),
        "llama_dynamic": hf.LlamaConfig(
            **{**SIZES, "max_position_embeddings": 16}, rope_parameters=_rope("dynamic", factor=2.0)
        ),
        "llama_yarn": hf.LlamaConfig(
            **SIZES,
            tie_word_embeddings=True,
            rope_parameters=_rope(
                "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=2.0, beta_slow=0.25
            ),
        ),
        "mistral": hf.MistralConfig(**SIZES, sliding_window=7),
        "qwen2": hf.Qwen2Config(
            **SIZES, tie_word_embeddings=True, use_sliding_window=True, sliding_window=6, max_window_layers=2
        ),
        "qwen3": hf.Qwen3Config(**SIZES, rope_parameters=_rope("default")),
        "smollm3": hf.SmolLM3Config(**{**SIZES, "num_hidden_layers": 4}, no_rope_layers=[1, 0, 1, 0]),
        "gemma2": hf.Gemma2Config(
            **SIZES, **gemma, attn_logit_softcapping=3.0, final_logit_softcapping=4.0, layer_types=[local, full, local]
        ),
        "gemma3": hf.Gemma3TextConfig(
            **{**SIZES, "num_hidden_layers": 4},
            **gemma,
            layer_types=[local, local, full, local],
            rope_parameters={full: _rope("linear", factor=4.0), local: {"rope_type": "default", "rope_theta": 30.0}},
        ),
        "phi3_short": _phi3(original_max_position_embeddings=48, max_position_embeddings=96),
        "phi3_long": _phi3(original_max_position_embeddings=16, sliding_window=9),
    }


# Settings each golden is there for: with any one of them changed, the reference's own logits must move well past
# the tolerance that ours are held to.
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
_PLAIN_PHI3 = {"rope_parameters": {**_PLAIN["rope_parameters"], "partial_rotary_factor": 0.8}}


def _changed_settings(name: str, config: hf.PreTrainedConfig) -> list[dict[str, object]]:
    window = getattr(config, "sliding_window", None)
    changes: list[dict[str, object]] = [{"rms_norm_eps": 0.05}]
    if window is not None:
        changes += [{"sliding_window": window - 1}, {"sliding_window": window + 1}]
    if name.startswith("llama_"):
        changes.append(_PLAIN)
    if name.startswith("phi3"):
        changes.append(_PLAIN_PHI3)
    if name.startswith("gemma"):
        ropes = config.rope_parameters
        swapped = {k: ropes[o] for k, o in zip(ropes, reversed(ropes), strict=True)} if name == "gemma3" else None
        changes += [{"query_pre_attn_scalar": 8}, {"layer_types": ["full_attention"] * config.num_hidden_layers}]
        changes += [{"rope_parameters": swapped}] if swapped else [{"attn_logit_softcapping": None}]
    if name == "smollm3":
        changes += [{"no_rope_layers": [1, 1, 1, 0]}, {"no_rope_layers": [1, 0, 1, 1]}]
    return changes


def _check_sensitive(name: str, model: hf.PreTrainedModel, ids: torch.Tensor, logits: np.ndarray) -> None:
    for change in _changed_settings(name, model.config):
        config = type(model.config)(**{**model.config.to_dict(), **copy.deepcopy(change)})
        other = type(model)._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        other.load_state_dict(model.state_dict())
        moved = np.abs(_logits(other, ids) - logits).max()
        assert moved > 1e-2, f"{name}: {change} moves the logits by {moved} only"


def _logits(model: hf.PreTrainedModel, ids: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return model(ids[None]).logits[0].float().numpy()


def _randomise(model: hf.PreTrainedModel, seed: int) -> None:
    """Weights that keep activations near 1 and scores and logits a few units wide; norms around 1, biases around 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if "norm" in name:
            centre = 0.0 if "Gemma" in type(model).__name__ else 1.0
            p.data.copy_(centre + 0.3 * noise)
        elif name.endswith("bias"):
            p.data.copy_(0.4 * noise)
        elif "embed_tokens" in name:
            p.data.copy_(noise * 0.6)
        else:
            p.data.copy_(noise * 1.5 / p.shape[-1] ** 0.5)


def _old_spelling(folder: Path) -> None:
    """Rewrites rope settings as releases before transformers 5 did."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make(name: str, config: hf.PreTrainedConfig) -> None:
    folder = HERE / name
    seed = zlib.crc32(name.encode())
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    _randomise(model, seed)
    ids = torch.from_numpy(np.random.default_rng(seed).integers(3, config.vocab_size, LENGTH))
    logits = _logits(model, ids)
    assert np.isfinite(logits).all(), f"{name}: logits not finite"
    assert 1 < np.abs(logits).max() < 100, f"{name}: logits out of a useful range ({np.abs(logits).max()})"
    _check_sensitive(name, model, ids, logits)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name == "llama_linear":
        _old_spelling(folder)
    np.savez_compressed(folder / "logits.npz", input_ids=ids.numpy(), logits=logits)
    size = sum(f.stat().st_size for f in folder.iterdir())
    assert size < 300_000, f"{name}: {size} bytes"
    print(f"{name}: {size / 1000:.0f} kB, |logits| up to {np.abs(logits).max():.1f}")


if __name__ == "__main__":
    everything = configs()
    for chosen in sys.argv[1:] or everything:
        make(chosen, everything[chosen])
