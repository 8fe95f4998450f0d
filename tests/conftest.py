"""Fixtures that several test folders share: the demo model, and tiny random checkpoints with a tokenizer of their own.

The demo model is fetched once into the user's cache; its conversion is kept in pytest's cache, under a key of the
converting code, so that a change there is always tested.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import jaxsqueeze
from jaxsqueeze.checkpoint import demo
from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.gguf_source import GGUFSource
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.manifest import is_converted

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Unsymmetric on purpose: head_dim is not hidden / heads, KV heads are not query heads.
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF file."""
    return demo.fetch()


@pytest.fixture(scope="session")
def demo_model(demo_gguf: Path, request: pytest.FixtureRequest) -> Path:
    """The demo model, converted in bfloat16."""
    package = Path(jaxsqueeze.__file__).parent
    code = sorted(
        [*package.glob("checkpoint/*.py"), *package.glob("models/families/*.py"), package / "models/config.py"]
    )
    key = hashlib.sha256(b"".join(p.read_bytes() for p in code)).hexdigest()[:12]
    parent = request.config.cache.mkdir("demo_model")
    out = parent / key
    if not is_converted(out):
        for old in parent.iterdir():
            if is_converted(old):
                shutil.rmtree(old)
        convert(GGUFSource(demo_gguf), out, name="demo", reuse=True)
    return out


@pytest.fixture(scope="session")
def hf_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny random Llama-shaped checkpoint folder: ``hf_checkpoint(**config overrides)``."""

    def make(**overrides: Any) -> Path:
        folder = tmp_path_factory.mktemp("hf")
        write_hf_checkpoint(folder, {**TINY_CONFIG, **overrides})
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model(hf_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted tiny random model (float32) with a byte-level tokenizer, chat template and EOS <|im_end|>."""
    out = tmp_path_factory.mktemp("converted") / "tiny"
    convert(HFFolder(hf_checkpoint()), out, name="tiny", dtype="float32")
    return out


def write_hf_checkpoint(folder: Path, config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """``config.json``, one safetensors file of random float32 weights, tokenizer files; returns the tensors."""
    rng = np.random.default_rng(seed)
    hidden, mlp, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def norm() -> np.ndarray:
        return rng.uniform(0.5, 1.5, hidden).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden), "model.norm.weight": norm()}
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, shape in {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }.items():
            tensors[f"{layer}.{name}.weight"] = matrix(*shape)
        tensors[f"{layer}.input_layernorm.weight"] = norm()
        tensors[f"{layer}.post_attention_layernorm.weight"] = norm()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    write_byte_tokenizer(folder)
    return tensors


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer of 259 tokens: three special ones, then one for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*SPECIALS, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
