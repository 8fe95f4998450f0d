"""Rarity buckets and figures, from numbers counted by hand and from formulas."""

from __future__ import annotations

import numpy as np
import pytest

from jaxsqueeze.report.quality import corpus, render
from jaxsqueeze.report.quality.summary import figures, summarise


def test_rarity_of_words():
    """Ten words of ten occurrences each fill a decile each; words seen once or never are apart."""
    ids = np.array([word for word in range(10) for _ in range(10)] + [11])
    assert corpus.rarity(ids, 14).tolist() == [*range(10), 10, 10, 10, 10]
    # One word of 8 in 10 occurrences: its middle is in the 4th tenth; the other word, of 2, ends at 100 %.
    assert corpus.rarity(np.array([5] * 8 + [3] * 2), 6).tolist() == [10, 10, 10, 9, 10, 4]


def test_more_frequent_words_are_never_in_a_rarer_bucket():
    ids = np.random.default_rng(0).zipf(1.3, 5000) % 300
    bucket, count = corpus.rarity(ids, 300), np.bincount(ids, minlength=300)
    order = np.argsort(-count, kind="stable")
    assert np.all(np.diff(bucket[order]) >= 0)
    share = [count[bucket == i].sum() / count[count >= 2].sum() for i in range(10)]
    assert sum(share) == pytest.approx(1)
    assert set(bucket[count <= 1]) == {10}


def test_windows():
    ids = np.arange(11)
    assert [w.tokens.tolist() for w in corpus.windows(ids, 5, None)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [len(w.tokens) for w in corpus.windows(ids, 5, 8)] == [5, 3]
    with pytest.raises(ValueError, match="fewer than two tokens"):
        corpus.windows(ids, 5, 1)


@pytest.fixture
def scores():
    rng = np.random.default_rng(1)
    n = 2000
    return {
        "ref_nll": rng.exponential(2, n).astype(np.float32),
        "nll": rng.exponential(2.1, n).astype(np.float32),
        "kl": rng.exponential(0.1, n).astype(np.float32) ** 2,
        "ref_top": rng.integers(0, 4, n),
        "top": rng.integers(0, 4, n),
        "ref_sure": rng.uniform(0.8, 1, n).astype(np.float32),
    }


def test_figures_are_their_formulas(scores):
    where = np.arange(2000) % 3 == 0
    found = figures(scores, where)
    kl = np.sort(scores["kl"][where].astype(np.float64))
    assert found["positions"] == len(kl) == 667
    assert found["ref_perplexity"] == pytest.approx(np.exp(scores["ref_nll"][where].astype(np.float64).mean()))
    assert found["perplexity"] == pytest.approx(np.exp(scores["nll"][where].astype(np.float64).mean()))
    assert (found["kl_p50"], found["kl_max"]) == (pytest.approx(kl[333]), kl[-1])
    assert found["kl_p99"] == pytest.approx(kl[int(666 * 0.99)] + (666 * 0.99 % 1) * np.diff(kl)[int(666 * 0.99)])
    same = [a == b for a, b, w in zip(scores["top"], scores["ref_top"], where, strict=True) if w]
    assert found["agreement"] == pytest.approx(sum(same) / 667)
    sure = [s for s, p in zip(same, scores["ref_sure"][where], strict=True) if p > 0.9]
    assert found["sure"] == len(sure)
    assert found["flips"] == pytest.approx(1 - sum(sure) / len(sure))


def test_slices_are_whole(scores):
    rng = np.random.default_rng(2)
    targets, context = rng.integers(0, 50, 2000), np.arange(2000) % 64
    found = summarise(scores, targets, context, rng.integers(0, 11, 50), (16, 64))
    assert sum(part["positions"] for part in found["by_rarity"].values()) == 2000
    assert [part["positions"] for part in found["by_context"].values()] == [sum(context < 16), sum(context >= 16)]
    rare = [found["by_rarity"][name]["positions"] for name in corpus.RARE]
    assert found["rare"]["positions"] == sum(rare)
    nothing = figures(scores, np.zeros(2000, bool))
    assert nothing == {"positions": 0}


def test_pictures_of_slices_without_positions(scores, tmp_path):
    found = summarise(scores, np.zeros(2000, int), np.ones(2000, int), np.full(3, 10), (16,))
    found |= {"candidate": "one", "reference": "other", "tokens": 2000}
    render.plot(tmp_path / "a.png", found, scores["kl"], {"none": np.zeros(2000, bool)})
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert render.table(found).row_count == 2 + 11 + 1
