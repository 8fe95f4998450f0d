"""Builds checkpoints for tests: tiny and large random ones, and GGUF twins of Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

INDEX = "model.safetensors.index.json"
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


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama-shaped checkpoint."""
    hidden, mlp, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{i}.{part}.weight": shape for part, shape in parts.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def write_hf_checkpoint(folder: Path, config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """``config.json``, one safetensors file of random float32 weights, tokenizer files; returns the tensors."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        else:
            tensors[name] = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
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


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, by the safetensors package alone."""
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as f:
            out |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a mapping)
    return out


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested dict to (path, leaf)."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value


# What llama.cpp's converter writes, per architecture: the prefix of metadata keys and the parts' names.
_GGUF_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str, architecture: str) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, leaf = rest.rsplit(".", 1)
    if part == "post_attention_layernorm":
        ours = "post_attention_norm" if architecture.startswith("gemma") else "ffn_norm"
    else:
        ours = _GGUF_PARTS[part]
    return f"blk.{layer}.{ours}.{leaf}"


def gguf_values(name: str, value: np.ndarray, architecture: str, config: dict[str, Any]) -> np.ndarray:
    """The values llama.cpp stores: Llama's q and k rows with each rotary pair side by side, Gemma's norms plus one."""
    value = value.astype(np.float32)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return value + 1
    for projection, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if architecture in ("llama", "smollm3") and f".{projection}." in name:
            heads = config[key]
            dim = len(value) // heads
            out = np.empty_like(value)
            for head in range(heads):
                for i in range(dim // 2):
                    out[head * dim + 2 * i] = value[head * dim + i]
                    out[head * dim + 2 * i + 1] = value[head * dim + i + dim // 2]
            return out
    return value


def write_gguf(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Writes a file with the ``gguf`` package. ``metadata`` without the architecture's prefix where a key starts with
    a dot; ``kinds``: quantised types, the tensor then being raw bytes of blocks."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        key = f"{architecture}{key}" if key.startswith(".") else key
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name)
        if tensor.dtype == ml_dtypes.bfloat16:
            writer.add_tensor(name, tensor.view(np.uint16).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TINY_TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<|end|>", "a", "b", "c", "ab", "abc"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
}


def gguf_twin(
    folder: Path,
    path: Path,
    architecture: str,
    extra: dict[str, Any],
    *,
    more: dict[str, np.ndarray] | None = None,
    drop: set[str] | None = None,
    replace: dict[str, np.ndarray] | None = None,
) -> Path:
    """The GGUF file that holds the same model as a Hugging Face folder, in F32. ``more``: further GGUF tensors;
    ``drop`` and ``replace``: by Hugging Face name."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    metadata = {
        ".block_count": config["num_hidden_layers"],
        ".context_length": config["max_position_embeddings"],
        ".embedding_length": config["hidden_size"],
        ".feed_forward_length": config["intermediate_size"],
        ".attention.head_count": config["num_attention_heads"],
        ".attention.head_count_kv": config["num_key_value_heads"],
        ".attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        ".rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        **TINY_TOKENIZER,
        **extra,
    }
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    metadata.setdefault(".attention.key_length", dim)
    metadata.setdefault(".attention.value_length", dim)
    tensors = {
        gguf_name(n, architecture): gguf_values(n, v, architecture, config)
        for n, v in {**read_tensors(folder), **(replace or {})}.items()
        if n not in (drop or ())
        if not (n == "lm_head.weight" and config.get("tie_word_embeddings"))
    }
    return write_gguf(path, architecture, metadata, {**tensors, **(more or {})})


def write_random(folder: Path, config: dict[str, Any], shard_bytes: int) -> tuple[int, int]:
    """A sharded bfloat16 checkpoint of any size, written in constant memory; returns bytes of the largest tensor and of
    all. Weights repeat one random block."""
    folder.mkdir(parents=True)
    block = (0.02 * np.random.default_rng(0).standard_normal(1 << 22, np.float32)).astype(ml_dtypes.bfloat16).tobytes()
    sizes = {name: (shape, 2 * int(np.prod(shape))) for name, shape in tensor_shapes(config).items()}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, (_, nbytes) in sizes.items():
        if filled and filled + nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        header, end = {}, 0
        for name in names:
            shape, nbytes = sizes[name]
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
            end += nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                left = sizes[name][1]
                while left:
                    left -= out.write(block[:left])
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return max(n for _, n in sizes.values()), sum(n for _, n in sizes.values())
