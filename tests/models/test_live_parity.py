"""Live comparison with transformers at sizes drawn afresh for each seed, beyond what the goldens fix."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
FULL, LOCAL = "full_attention", "sliding_attention"


def drawn_config(family: str, seed: int):
    """A random transformers config of ``family`` with unsymmetric sizes."""
    import transformers as hf

    rng = np.random.default_rng(seed)

    def pick(*choices):
        return choices[rng.integers(len(choices))]

    kv, group = int(pick(1, 2, 3)), int(pick(2, 3, 5))
    layers = int(pick(3, 5))
    sizes = {
        "vocab_size": int(rng.integers(60, 200)),
        "hidden_size": kv * group * int(pick(6, 14)),
        "intermediate_size": int(rng.integers(30, 90)),
        "num_hidden_layers": layers,
        "num_attention_heads": kv * group,
        "num_key_value_heads": kv,
        "head_dim": int(pick(8, 12, 18)),
        "max_position_embeddings": 64,
        "rms_norm_eps": float(pick(1e-6, 1e-3)),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": bool(pick(True, False)),
    }
    window = int(rng.integers(1, 20))
    mixed = [LOCAL if rng.integers(2) else FULL for _ in range(layers)]
    if family == "llama":
        bias, mlp_bias = bool(pick(True, False)), bool(pick(True, False))
        return hf.LlamaConfig(**sizes, attention_bias=bias, mlp_bias=mlp_bias)
    if family == "mistral":
        return hf.MistralConfig(**sizes, sliding_window=window)
    if family == "qwen2":
        return hf.Qwen2Config(**sizes, use_sliding_window=True, sliding_window=window, layer_types=mixed)
    if family == "qwen3":
        return hf.Qwen3Config(**sizes, use_sliding_window=True, sliding_window=window, layer_types=mixed)
    if family == "smollm3":
        return hf.SmolLM3Config(**sizes, no_rope_layers=[int(x) for x in rng.integers(0, 2, layers)])
    if family == "gemma2":
        return hf.Gemma2Config(**sizes, sliding_window=window, layer_types=mixed, query_pre_attn_scalar=11)
    if family == "gemma3":
        rope = {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, LOCAL: {"rope_type": "default"}}
        return hf.Gemma3TextConfig(
            **sizes, sliding_window=window, layer_types=mixed, query_pre_attn_scalar=11, rope_parameters=rope
        )
    if family == "phi3":
        del sizes["head_dim"]
        sizes["hidden_size"] = kv * group * 12
        factors = {k: [float(x) for x in rng.uniform(1, 6, 3)] for k in ("short_factor", "long_factor")}
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **factors}
        return hf.Phi3Config(**sizes, original_max_position_embeddings=int(pick(20, 50)), rope_parameters=rope)
    raise ValueError(family)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3", "phi3"])
def test_fresh_random_model(family, seed, golden_from_tensors, paged_session):
    import torch
    import transformers as hf

    config = drawn_config(family, seed)
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for name, p in model.named_parameters():
        scale = 0.3 if "norm" in name or name.endswith("bias") else p.shape[-1] ** -0.5
        p.data.copy_(("norm" in name and "gemma" not in family) + scale * torch.randn(p.shape))
    length = 41
    ids = np.random.default_rng(seed).integers(3, config.vocab_size, length)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    tensors = {name: t.numpy() for name, t in model.state_dict().items()}
    golden = golden_from_tensors(family, config.to_dict(), tensors, ids, logits)
    session = paged_session(golden, page_size=8)
    session.step((0, 29), 1)
    for _ in range(length - 29):
        session.step((2, 2), 0, 1)
