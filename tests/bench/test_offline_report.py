"""The side-by-side measurement with stand-ins for the programs: who is asked what, in which order, and the table."""

import io

import pytest
from rich.console import Console

from jaxsqueeze.bench import offline
from jaxsqueeze.bench.workloads import Corpus, Lengths


class StandIn:
    """Answers with speeds given beforehand."""

    def __init__(self, name, decode, log):
        self.name, self.decode, self.log = name, iter(decode), log

    def call(self, name, *, prompts, output_tokens):
        self.log.append((self.name, prompts, output_tokens))
        return {
            "prefill_tokens_per_s": 100.0,
            "decode_tokens_per_s": next(self.decode),
            "output_tokens_per_s": 10.0,
            **({"host_exposed_share": 0.031, "host_busy_share": 0.2} if self.name == "engine" else {}),
        }


@pytest.fixture
def measured():
    log = []
    workers = {
        "engine": StandIn("engine", [1.0, 50.0, 30.0, 40.0, 1.0, 100.0, 100.0, 100.0], log),
        "transformers": StandIn("transformers", [1.0, 20.0, 10.0, 12.0, 1.0, 40.0, 50.0, 80.0], log),
    }
    return offline._in_turn(workers, Corpus.random_ids(5000), (1, 3), 3, 16, 8), log


def test_programs_alternate_on_the_same_fresh_prompts(measured):
    _, log = measured
    assert [name for name, _, _ in log] == ["engine", "transformers"] * 8
    assert all(log[i][1:] == log[i + 1][1:] for i in range(0, 16, 2))
    assert [len(prompts) for _, prompts, _ in log[::2]] == [1] * 4 + [3] * 4
    rows = [tuple(p) for _, prompts, _ in log[::2] for p in prompts]
    assert {len(row) for row in rows} == {16}
    assert len(set(rows)) == len(rows)


def test_medians_leave_the_first_pass_out(measured):
    figures, _ = measured
    assert [entry["rows"] for entry in figures] == [1, 3]
    assert figures[0]["median"]["engine"]["decode_tokens_per_s"] == 40
    assert figures[0]["median"]["transformers"]["decode_tokens_per_s"] == 12
    assert [r["decode_tokens_per_s"] for r in figures[0]["repeats"]["engine"]] == [50, 30, 40]


def test_table_has_spread_ratio_and_host_share(measured):
    console = Console(width=160, file=io.StringIO())
    console.print(offline.comparison(measured[0]))
    text = console.file.getvalue()
    (line,) = [x for x in text.splitlines() if "decode" in x and "30.0..50.0" in x]
    assert "40.0 (30.0..50.0)" in line
    assert "12.0 (10.0..20.0)" in line
    assert "3.33x" in line
    assert "2.00x" in text
    assert "3.1% of step time" in text


def test_an_engine_alone_has_no_ratio_column():
    engine = {"engine": StandIn("engine", [None] * 9, [])}
    figures = offline._in_turn(engine, Corpus.random_ids(5000), (1,), 2, 4, 1)
    console = Console(width=160, file=io.StringIO())
    console.print(offline.comparison(figures))
    assert "engine /" not in console.file.getvalue()
    assert figures[0]["median"]["engine"]["decode_tokens_per_s"] is None


def test_batches_have_one_length():
    assert offline.fixed(Lengths.parse("64")) == 64
    with pytest.raises(ValueError, match="uniform:1:2"):
        offline.fixed(Lengths.parse("uniform:1:2"))
