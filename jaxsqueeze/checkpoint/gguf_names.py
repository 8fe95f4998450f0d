"""GGUF tensor names to Hugging Face's, and what the GGUF writer did to the values that has to be undone.

Two changes matter: Llama-shaped models store q and k rows interleaved (rotary pairs side by side) where Hugging Face
stores halves; Gemma's norms are stored with the +1 already added.
"""

from __future__ import annotations

import re

import numpy as np

ROW_PERMUTED = frozenset({"llama", "smollm3"})  # architectures whose q and k rows are interleaved
NORMS_PLUS_ONE = frozenset({"gemma2", "gemma3"})  # architectures whose norms hold the effective multiplier
POST_NORMS = NORMS_PLUS_ONE  # architectures with norms on both sides of each block
FUSED = frozenset({"phi3"})  # ffn_up holds gate and up

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Rope tables: settings, not parameters.
ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_PER_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_name(architecture: str, name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name without one is returned as it is."""
    if name in _TOP:
        return _TOP[name]
    if not (match := _LAYER.fullmatch(name)):
        return name
    layer, part, leaf = match.groups()
    table = dict(_PER_LAYER)
    if architecture in POST_NORMS:
        table |= {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    if architecture in FUSED:
        table["ffn_up"] = "mlp.gate_up_proj"
    return f"model.layers.{layer}.{table[part]}.{leaf}" if part in table else name


def undo_interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """q or k ``[heads * D, ...]`` with rotary pairs at (2i, 2i + 1) to Hugging Face's (i, i + D / 2).

    ``heads`` is the projection's own count: k has fewer than q under grouped-query attention.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
