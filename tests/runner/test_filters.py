"""top_k, top_p and min_p through the sampler: what many draws give is what may be drawn. What each filter keeps exactly
is tested where it is written (tests/kernels/sample_topk)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runner.build_slots import LOW, V, admitted, row, sampled

DRAWS = 512  # of each row: a token of probability 0.1 is missed once in 10^23
P = np.full(V, LOW)
P[[3, 8, 21, 39]] = np.log([0.4, 0.3, 0.2, 0.1])


def drawn(*settings: dict[str, float], logits: np.ndarray = P) -> list[set[int]]:
    """Tokens that rows of these settings give, all in one batch."""
    slots = admitted({i: row(**{"temperature": 1.0, "seed": i, **s}) for i, s in enumerate(settings)})
    which = np.resize(np.arange(len(settings)), DRAWS * 3)
    tokens, _ = sampled(np.broadcast_to(logits, (len(which), V)), slots, np.arange(len(which)), which)
    return [set(tokens[which == i].tolist()) for i in range(len(settings))]


def test_each_filter():
    assert drawn({"top_k": 2}, {"top_p": 0.71}, {"min_p": 0.45}) == [{3, 8}, {3, 8, 21}, {3, 8, 21}]


def test_filters_together():
    """top_p is of what top_k left; min_p is relative to the best word."""
    assert drawn({"top_k": 2, "top_p": 0.5}, {"top_k": 3, "top_p": 0.8}, {"top_k": 3, "min_p": 0.7}) == [
        {3},
        {3, 8, 21},
        {3, 8},
    ]


def test_neighbours_do_not_matter():
    """A greedy row's filters are idle; a row without filters draws everything."""
    assert drawn({"temperature": 0.0, "top_k": 3, "min_p": 0.1}, {}, {"top_k": 1}) == [{3}, {3, 8, 21, 39}, {3}]


def test_filters_come_after_the_temperature():
    hot, cold = drawn({"temperature": 3.0, "min_p": 0.5}, {"temperature": 0.5, "min_p": 0.5})
    assert hot == {3, 8, 21, 39}
    assert cold == {3, 8}


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}])
def test_equal_tokens_share_their_fate(filters):
    logits = P.copy()
    logits[[5, 6]] = P[3]
    assert drawn(filters, {}, logits=logits)[0] == {3, 5, 6}
