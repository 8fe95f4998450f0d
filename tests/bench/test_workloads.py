"""Traces are read and scaled as printed; prompts have exact lengths and share prefixes only where the trace says."""

import json

import numpy as np
import pytest

from jaxsqueeze.bench.workloads import Corpus, Item, Lengths, Workload, load_trace, synthetic, text_words

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:50.6805900,9,1
"""


@pytest.fixture
def azure(tmp_path):
    path = tmp_path / "conv.csv"
    path.write_text(AZURE)
    return path


def mooncake(tmp_path, rows):
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def row(prompt, ids, output=10, timestamp=0):
    return {"timestamp": timestamp, "input_length": prompt, "output_length": output, "hash_ids": ids}


def test_azure_lengths_and_times_are_scaled_by_the_printed_factors(azure):
    workload = load_trace(azure, length_scale=0.1, time_scale=0.5)
    assert [(x.input_tokens, x.output_tokens) for x in workload.items] == [(37, 4), (40, 11), (1, 1)]
    assert [x.arrival for x in workload.items] == pytest.approx([0, 4.314579 / 2, 64 / 2], abs=1e-5)
    assert "lengths x 0.1" in workload.description
    assert "time x 0.5" in workload.description


def test_limit_and_longest_total(azure):
    assert len(load_trace(azure, limit=2).items) == 2
    workload = load_trace(azure, max_total_tokens=450)
    assert [x.input_tokens for x in workload.items] == [374, 9]
    assert "1 longer than 450 tokens left out" in workload.description


def test_mooncake_blocks_keep_one_size_so_equal_ids_give_equal_prefixes(tmp_path):
    # 512 * 0.03 = 15.36: block by block rounding would drift off the common grid.
    path = mooncake(tmp_path, [row(1124, [7, 8, 9], timestamp=500), row(1536, [7, 8, 3], timestamp=2500)])
    first, second = load_trace(path, length_scale=0.03).items
    assert (first.block_tokens, first.input_tokens, second.input_tokens) == (15, 15 + 15 + 3, 45)
    assert (first.arrival, second.arrival) == (0.0, 2.0)
    corpus = Corpus.random_ids(1000)
    a, b = corpus.prompt(0, first), corpus.prompt(1, second)
    assert (len(a), len(b)) == (33, 45)
    assert a[:30] == b[:30]
    assert a[30:] != b[30:33]


def test_the_text_of_a_hash_id_does_not_depend_on_the_request():
    corpus = Corpus.random_ids(1000)
    block = Item(0.0, 16, 1, (5,), 16)
    assert corpus.prompt(0, block) == corpus.prompt(9, block)
    assert Corpus.random_ids(1000).prompt(3, block) == corpus.prompt(0, block)
    assert corpus.prompt(0, Item(0.0, 32, 1, (4, 5), 16))[16:] == corpus.prompt(0, block)


def test_different_hash_ids_give_different_text():
    corpus = Corpus(text_words(None))
    blocks = [corpus.prompt(0, Item(0.0, 24, 1, (h,), 24)) for h in range(3000)]
    assert len(set(blocks)) == 3000


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,12\n", "line 2"),
        ("x.csv", "a,b\n1,2\n", "TIMESTAMP"),
        ("x.jsonl", '{"timestamp": 0}', "input_length"),
        ("x.jsonl", json.dumps(row(1025, [1, 2])), "do not cover"),
        ("x.jsonl", json.dumps(row(10, [])), "do not cover"),
        ("x.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("x.txt", "", "no known trace"),
    ],
)
def test_bad_traces_name_the_fault(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=says) as error:
        load_trace(path)
    assert name in str(error.value)


def test_a_missing_trace_and_bad_scales_are_value_errors(tmp_path, azure):
    with pytest.raises(ValueError, match="cannot read"):
        load_trace(tmp_path / "none.csv")
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="--length-scale"):
            load_trace(azure, length_scale=scale)


def test_poisson_arrivals_have_the_asked_rate_and_exponential_gaps():
    workload = synthetic(20_000, Lengths.parse("8"), Lengths.parse("4"), rate=5.0)
    gaps = np.diff([x.arrival for x in workload.items])
    # 20,000 gaps: the mean lies within 5 standard errors (0.2 / sqrt(20000)), and an exponential's std is its mean.
    assert gaps.mean() == pytest.approx(0.2, abs=5 * 0.2 / np.sqrt(20_000))
    assert gaps.std() == pytest.approx(0.2, rel=0.05)
    assert workload.items[0].arrival == 0.0


def test_synthetic_is_repeatable_and_lengths_follow_their_distribution():
    make = lambda seed: synthetic(4000, Lengths.parse("uniform:4:9"), Lengths.parse("lognormal:100:0.5"), seed=seed)  # noqa: E731
    assert make(1) == make(1)
    assert make(1) != make(2)
    items = make(1).items
    assert {x.input_tokens for x in items} == set(range(4, 10))
    logs = np.log([x.output_tokens for x in items])
    assert np.median(logs) == pytest.approx(np.log(100), abs=0.05)
    assert logs.std() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("text", ["", "x", "0", "-3", "uniform:5", "uniform:9:4", "normal:3:1", "lognormal:10:-1"])
def test_bad_lengths_are_refused(text):
    with pytest.raises(ValueError, match="length"):
        Lengths.parse(text)


@pytest.mark.parametrize("text", ["64", "uniform:4:9", "lognormal:100:0.5"])
def test_lengths_print_as_they_were_written(text):
    assert str(Lengths.parse(text)) == text


def test_prompts_have_exact_lengths_and_no_common_start():
    corpus = Corpus.random_ids(300, size=5000)
    prompts = [corpus.prompt(i, Item(0.0, 40, 1)) for i in range(5000)]
    assert {len(p) for p in prompts} == {40}
    assert len({tuple(p) for p in prompts}) == 5000  # every start place is used once before one comes again
    assert min(map(min, prompts)) >= 150


def test_text_prompts_count_words_per_token():
    corpus = Corpus(text_words(None), units_per_token=0.75)
    assert len(corpus.prompt(0, Item(0.0, 100, 1)).split()) == 75


def test_an_empty_workload_is_refused():
    with pytest.raises(ValueError, match="no requests"):
        Workload("nothing", ())
