"""ModelConfig: every number the decoder needs, independent of any checkpoint format. No jax here.

A family file maps a Hugging Face ``config.json`` to this; the converter stores it in ``manifest.json``. A new kind of
block is a new field value here and a block file, never a test of the family's name in the forward code.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxsqueeze.types import CacheGroup

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
Activation = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding (Su et al. 2021), half-split pairs ``(i, i + rotary_dim / 2)``; dims past ``rotary_dim`` pass.

    The parameters of each kind are those of the paper or the model card that introduced it; unused ones stay at
    their default. ``original_max_len`` is the context the model was trained at.
    """

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_len: int = 0
    attention_factor: float | None = None  # yarn, longrope: scales cos and sin; None: the kind's own formula
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float = 0.0  # yarn; 0: not given
    mscale_all_dim: float = 0.0  # yarn; 0: not given
    truncate: bool = True  # yarn: round the correction range to whole dims
    short_factor: tuple[float, ...] = ()  # longrope, rotary_dim / 2 values
    long_factor: tuple[float, ...] = ()  # longrope


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """What differs between layers. ``window``: tokens visible to a query, itself included; None: all before it.
    ``rope``: index into ``ModelConfig.ropes``; None: no positional rotation (NoPE)."""

    window: int | None = None
    rope: int | None = 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    family: str  # names the mapping file; never tested by forward code
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    max_position: int  # context length the checkpoint claims
    norm_eps: float
    attn_scale: float  # multiplies q . k
    activation: Activation = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim of q and k, before rope
    post_norms: bool = False  # Gemma: RMSNorm after attention and after MLP too, before the residual add
    embed_scale: float = 1.0  # multiplies embeddings; rounded to the embedding's dtype as the reference does
    attn_softcap: float | None = None
    final_softcap: float | None = None
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # union of generation_config, config and tokenizer

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Layers by window, full attention first: each group has its own page table."""
        by_window: dict[int | None, list[int]] = {}
        for index, layer in enumerate(self.layers):
            by_window.setdefault(layer.window, []).append(index)
        order = sorted(by_window, key=lambda w: (w is not None, w or 0))
        return tuple(CacheGroup("full" if w is None else f"window{w}", tuple(by_window[w]), w) for w in order)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelConfig:
        def rope(r: dict[str, Any]) -> RopeConfig:
            factors = {k: tuple(r[k]) for k in ("short_factor", "long_factor") if k in r}
            return RopeConfig(**{**r, **factors})

        return cls(
            **{
                **data,
                "layers": tuple(LayerConfig(**x) for x in data["layers"]),
                "ropes": tuple(rope(x) for x in data["ropes"]),
                "eos_token_ids": tuple(data["eos_token_ids"]),
            }
        )
