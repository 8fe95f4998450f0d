"""Slot state: what an admission writes, and that it leaves nothing of the slot's last owner."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxsqueeze.runner.state import initial_state
from tests.runner.build_slots import ROWS, V, admitted, row

BUSY = row(
    prompt=(5, 3),
    output=(5, 4, 4),
    stop_ids=(5, 2),
    temperature=2.0,
    top_k=3,
    top_p=0.5,
    min_p=0.1,
    repetition_penalty=3.0,
    frequency_penalty=1.0,
    presence_penalty=1.0,
    logit_bias=((5, -9.0), (0, 3.0)),
    bad_words_ids=((5,), (4, 6)),
    min_tokens=9,
    seed=2**64 - 1,
    logprobs=4,
)


def leaves(tree: object) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def test_a_new_owner_finds_nothing_of_the_last():
    plain = row(seed=3)
    fresh = leaves(admitted({2: plain, 5: BUSY}))
    reused = leaves(admitted({2: plain}, into=admitted({2: BUSY, 5: BUSY})))
    for name, right in fresh.items():
        np.testing.assert_array_equal(reused[name], right, err_msg=name)


def test_every_field_is_written():
    """Each field of a busy sequence differs from an empty slot's, in its slot alone (what steps write excepted)."""
    empty, busy = leaves(initial_state(ROWS, V)), leaves(admitted({2: BUSY}))
    written_by_steps = {name for name in empty if name.endswith((".last_token", ".position"))}
    for name, before in empty.items():
        changed = [s for s in range(ROWS + 1) if not np.array_equal(before[s], busy[name][s])]
        assert changed == ([] if name in written_by_steps else [2]), name


def test_the_trash_slot_stays_done():
    _, state = admitted(dict.fromkeys(range(ROWS), BUSY))
    assert np.asarray(state.done).tolist() == [False] * ROWS + [True]


@pytest.mark.parametrize("seed", [0, 2**64 - 1, -1, -(2**63)])
def test_seeds_of_64_bits(seed):
    params, _ = admitted({0: row(seed=seed)})
    high, low = np.asarray(params.seed)[0].tolist()
    assert high * 2**32 + low == seed % 2**64
