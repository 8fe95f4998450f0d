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
    paged_session(golden).step((0, len(golden.ids)))


def test_in_chunks_then_token_by_token_beside_others(golden, paged_session):
    """Sequence 0 in chunks of 7, then token by token; 1 token by token from its first; 2 starts late; masked rows
    come and go between them."""
    session = paged_session(golden)
    length = len(golden.ids)
    in_chunks = length - 9
    for step in range(length + 5):
        chunk = min(7, in_chunks - session.computed[0])
        rows = [2 if step >= 5 else None, 0 if chunk <= 0 and session.computed[0] < length else None]
        session.step((0, chunk) if chunk > 0 else None, *rows, 1 if step < length else None)
    assert session.computed == {0: length, 1: length, 2: length}


def test_a_window_off_by_one_is_noticed(golden_named, paged_session):
    """The comparison above can fail. (make.py checks on the reference itself that each golden is this sensitive to
    the settings it is there for.)"""
    golden = golden_named("mistral")
    layers = tuple(dataclasses.replace(x, window=x.window + 1) for x in golden.cfg.layers)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        paged_session(golden, dataclasses.replace(golden.cfg, layers=layers)).step((0, len(golden.ids)))
