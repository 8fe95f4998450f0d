"""Our float32 logits against the reference's, within 1e-4, whichever way the tokens reach the paged pool."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from jaxsqueeze.models import families
from jaxsqueeze.models.decoder import abstract_params


def test_declared_tree_is_the_plans_tree(golden):
    declared = flatten_dict(nn.unbox(abstract_params(golden.cfg, jnp.dtype(jnp.bfloat16))), sep="/")
    assert {path: x.shape for path, x in declared.items()} == {path: x.shape for path, x in golden.flat.items()}
    assert {x.dtype for path, x in declared.items() if path.endswith("scale")} == {jnp.dtype(jnp.float32)}
    assert {path.split("/")[0] for path in declared} == set(families.units(golden.cfg))


def test_one_prefill(golden, paged_session):
    paged_session(golden).step((len(golden.ids), [(0, len(golden.ids))]))


def test_in_chunks_then_token_by_token_beside_others(golden, paged_session):
    """Sequence 0 in chunks of 8; sequences 1 and 2 token by token, staggered, from the first token on; a masked row
    between them. One compiled program: an 8-wide rectangle and one of three decode rows."""
    session = paged_session(golden, sequences=3)
    length = len(golden.ids)
    for step in range(length + 5):
        chunk = min(8, length - session.computed[0])
        first = (1, 1) if step < length else None
        late = (2, 1) if step >= 5 else None
        session.step((8, [(0, chunk) if chunk else None]), (1, [late, None, first]))
    assert session.computed == {0: length, 1: length, 2: length}


def _window(layers, change):
    return tuple(dataclasses.replace(x, window=x.window and x.window + change) for x in layers)


_PLAIN_ROPE = {"kind": "default"}
MUTATIONS = {
    "llama": lambda c: {"attn_scale": c.attn_scale * 1.05},
    "llama_llama3": lambda c: {"ropes": tuple(dataclasses.replace(r, **_PLAIN_ROPE) for r in c.ropes)},
    "llama_linear": lambda c: {"ropes": tuple(dataclasses.replace(r, **_PLAIN_ROPE) for r in c.ropes)},
    "llama_dynamic": lambda c: {"ropes": tuple(dataclasses.replace(r, **_PLAIN_ROPE) for r in c.ropes)},
    "llama_yarn": lambda c: {"ropes": tuple(dataclasses.replace(r, attention_factor=1.0) for r in c.ropes)},
    "mistral": lambda c: {"layers": _window(c.layers, 1)},
    "qwen2": lambda c: {"layers": _window(c.layers, -1)},
    "qwen3": lambda c: {"qk_norm": False},
    "smollm3": lambda c: {"layers": tuple(dataclasses.replace(x, rope=0) for x in c.layers)},
    "gemma2": lambda c: {"attn_softcap": None},
    "gemma3": lambda c: {"layers": tuple(dataclasses.replace(x, rope=0) for x in c.layers)},
    "phi3_short": lambda c: {"ropes": tuple(dataclasses.replace(r, short_factor=r.long_factor) for r in c.ropes)},
    "phi3_long": lambda c: {"layers": _window(c.layers, 1)},
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_goldens_notice_a_wrong_config(name, golden_named, paged_session):
    """The goldens would catch the usual mistakes: a changed setting moves the logits past the tolerance."""
    golden = golden_named(name)
    wrong = dataclasses.replace(golden.cfg, **MUTATIONS[name](golden.cfg))
    assert wrong != golden.cfg
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        paged_session(golden, wrong).step((len(golden.ids), [(0, len(golden.ids))]))
