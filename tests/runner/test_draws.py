"""Draws follow softmax, depend on (seed, position, logits) alone, and a broken row breaks nobody else."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tests.runner.build_slots import ROWS, V, admitted, choose, row, sampled

DRAWS = 4096
RNG = np.random.default_rng(0)
LOGITS = np.random.default_rng(1).normal(size=V)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def many(sequences: dict[int, object], logits: np.ndarray = LOGITS, first: int = 0) -> np.ndarray:
    """``DRAWS`` tokens: the slots of ``sequences`` in turn, at positions ``first``, ``first + 1``, ..."""
    slots = np.resize(list(sequences), DRAWS)
    positions = first + np.arange(DRAWS) // len(sequences)
    tokens, _ = sampled(np.broadcast_to(logits, (DRAWS, V)), admitted(sequences), positions, slots)
    return tokens


def assert_follows(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square at the 0.1 % level over the tokens that are expected at least five times."""
    count, expected = np.bincount(tokens, minlength=V), probabilities * len(tokens)
    assert count[probabilities == 0].sum() == 0
    rare = expected < 5
    pairs = [(c, e) for c, e in zip(count[~rare], expected[~rare], strict=True)]
    if expected[rare].sum() > 0:
        pairs.append((count[rare].sum(), expected[rare].sum()))
    assert stats.chisquare(*zip(*pairs, strict=True)).pvalue > 1e-3


class TestDistribution:
    @pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, -5])
    def test_positions_of_one_seed(self, seed):
        assert_follows(many({0: row(temperature=1, seed=seed)}), softmax(LOGITS))

    def test_neighbouring_seeds(self):
        assert_follows(many({s: row(temperature=1, seed=s) for s in range(ROWS)}), softmax(LOGITS))

    @pytest.mark.parametrize("temperature", [0.3, 0.7, 2.0, 100.0])
    def test_temperature(self, temperature):
        assert_follows(many({0: row(temperature=temperature, seed=9)}), softmax(LOGITS / temperature))

    def test_filters_renormalise(self):
        p = softmax(LOGITS / 0.8)
        order = np.argsort(-p)
        p[order[6:]] = 0
        tokens = many({0: row(temperature=0.8, top_k=6, seed=4)})
        assert_follows(tokens, p / p.sum())

    def test_penalties_come_before_the_temperature(self):
        x = LOGITS.copy()
        x[3] -= 1.5
        settings = {"frequency_penalty": 0.5, "temperature": 0.7, "seed": 2}
        assert_follows(many({0: row(output=(3, 3, 3), **settings)}, first=4), softmax(x / 0.7))

    @pytest.mark.parametrize("gap", [1, 2])
    def test_tokens_at_neighbouring_positions_are_independent(self, gap):
        tokens = many({0: row(temperature=1, seed=11)}, logits=np.where(np.arange(V) < 4, 0.0, -np.inf))
        table = np.zeros((4, 4))
        np.add.at(table, (tokens[:-gap], tokens[gap:]), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-3

    @pytest.mark.parametrize("other", [8, 7 + 2**32, 7 + 0x9E3779B97F4A7C15])
    def test_tokens_of_two_seeds_are_independent(self, other):
        flat = np.where(np.arange(V) < 4, 0.0, -np.inf)
        tokens = many({0: row(temperature=1, seed=7), 1: row(temperature=1, seed=other % 2**64)}, logits=flat)
        table = np.zeros((4, 4))
        np.add.at(table, (tokens[::2], tokens[1::2]), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-3

    @pytest.mark.parametrize("off", [-1, 0, V, V + 1, 10**9])
    def test_a_top_k_that_is_off_reaches_all_tokens(self, off):
        tokens = many({0: row(temperature=1, top_k=off, seed=3)}, logits=np.zeros(V))
        assert set(tokens.tolist()) == set(range(V))
        np.testing.assert_array_equal(tokens, many({0: row(temperature=1, seed=3)}, logits=np.zeros(V)))

    def test_what_is_kept_is_drawn_and_nothing_else(self):
        p = np.full(V, -np.inf)
        p[:4] = np.log([0.4, 0.3, 0.2, 0.1])
        assert set(many({0: row(temperature=1, top_k=2, top_p=0.5, seed=1)}, p).tolist()) == {0}
        assert set(many({0: row(temperature=1, top_p=0.5, seed=1)}, p).tolist()) == {0, 1}
        assert set(many({0: row(temperature=1, top_k=3, seed=1)}, p).tolist()) == {0, 1, 2}
        assert set(many({0: row(temperature=1, min_p=0.6, seed=1)}, p).tolist()) == {0, 1}


class TestOwnSeed:
    LOGITS = RNG.normal(size=(ROWS, V))

    def mine(self, slot: int, place: int, neighbours: dict[int, object]) -> int:
        """The token of seed 42 at position 6, sitting in ``slot`` and computed in row ``place``."""
        rows = {**neighbours, slot: row(temperature=1.3, top_p=0.9, seed=42)}
        order = [s for s in range(ROWS) if s != slot]
        order.insert(place, slot)
        logits = np.array(self.LOGITS)
        logits[place] = LOGITS
        positions = RNG.integers(0, 50, ROWS)
        positions[place] = 6
        return int(sampled(logits, admitted(rows), positions, order)[0][place])

    def test_neither_slot_row_nor_neighbours_matter(self):
        unseeded = {s: row(temperature=1, seed=100 + s, top_k=2) for s in range(ROWS)}
        greedy = {s: row(repetition_penalty=2) for s in range(ROWS)}
        alone = self.mine(0, 0, {})
        for slot, place in [(0, 7), (3, 0), (7, 7), (5, 2)]:
            for neighbours in ({}, unseeded, greedy):
                assert self.mine(slot, place, neighbours) == alone

    def test_as_in_a_batch_of_another_size(self):
        sequence = {0: row(temperature=1, seed=42)}
        tokens = many(sequence)
        for position in range(20):
            logits = np.array(self.LOGITS)
            logits[2] = LOGITS
            ours = sampled(logits, admitted(sequence), [position] * ROWS, [1, 2, 0, 3, 4, 5, 6, 7])[0][2]
            assert ours == tokens[position]


class TestExtremes:
    def test_a_tiny_temperature_is_greedy(self):
        logits = np.tile(20 + LOGITS, (ROWS, 1))
        for temperature in (1e-3, 1e-20, 1e-37, 2e-38, 1e-42, 1e-60):
            for top_p in (1, 0.5):
                rows = {s: row(temperature=temperature, top_p=top_p, seed=s) for s in range(ROWS)}
                assert set(choose(rows, logits).values()) == {int(np.argmax(LOGITS))}

    def test_broken_rows_say_so_and_neighbours_feel_nothing(self):
        rows = {s: row(temperature=[0.0, 1.0][s % 2], seed=s, frequency_penalty=0.5) for s in range(ROWS)}
        logits = RNG.normal(size=(ROWS, V))
        right = choose(rows, logits)
        for bad in (np.nan, np.inf):
            broken = logits.copy()
            broken[2, 7], broken[5, 0] = bad, bad
            broken[3], broken[6] = -np.inf, -np.inf
            assert choose(rows, broken) == {**right, 2: -2, 3: -2, 5: -2, 6: -2}

    def test_masked_tokens_are_never_chosen(self):
        logits = np.full((ROWS, V), -np.inf)
        logits[:, 3], logits[:, 30] = 0.0, -20.0
        settings = {"top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.7, "presence_penalty": -2.0}
        rows = {s: row(prompt=(3, 4), output=(5,), temperature=s % 3, seed=s, **settings) for s in range(ROWS)}
        assert set(choose(rows, logits).values()) == {3}

    def test_every_token_blocked(self):
        """A request can ask for the impossible; it alone fails."""
        logits = np.full((ROWS, V), -np.inf)
        logits[:, 3], logits[:, 4] = 1.0, 0.0
        rows = {s: row(temperature=s % 2, seed=1) for s in range(ROWS)}
        rows[4] = row(bad_words_ids=((3,), (4,)))
        rows[5] = row(bad_words_ids=((3,), (4,)), temperature=1)
        chosen = choose(rows, logits)
        assert (chosen[4], chosen[5]) == (-2, -2)
        assert {chosen[s] for s in (0, 2, 6)} == {3}
        assert {chosen[s] for s in (1, 3, 7)} <= {3, 4}
