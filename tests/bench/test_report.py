"""Figures against hand-computed values; goodput on a case small enough to count by eye."""

import json

import pytest
from rich.console import Console

from jaxsqueeze.bench import machine, report
from jaxsqueeze.bench.outcome import Outcome

# Four requests over 10 s. TTFT 100, 300, 200 ms; TPOT 50, 10, 100 ms; the last one failed.
OUTCOMES = [
    Outcome(0.0, 0.0, 0.25, (0.1, 0.15, 0.2), prompt_tokens=10, output_tokens=3, cached_tokens=4, has_usage=True),
    Outcome(1.0, 1.1, 1.4, (1.3, 1.32), prompt_tokens=20, output_tokens=3, has_usage=True),
    Outcome(2.0, 2.0, 3.0, (2.2, 2.3, 2.4), prompt_tokens=30, output_tokens=3, has_usage=True),
    Outcome(3.0, 3.0, 10.0, (3.5,), prompt_tokens=0, output_tokens=1, error="HTTP 500: no"),
]


def by_hand(values, p):
    """Linear interpolation between order statistics, written out."""
    values = sorted(values)
    place = (len(values) - 1) * p / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def test_percentiles_interpolate_linearly():
    values = [9.0, 1.0, 4.0, 25.0, 16.0, 36.0]
    figures = report.percentiles(values)
    assert figures == pytest.approx({"mean": 91 / 6, **{f"p{p}": by_hand(values, p) for p in (50, 95, 99)}})
    assert figures["p50"] == 12.5
    assert report.percentiles([3.0]) == {"mean": 3.0, "p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert set(report.percentiles([]).values()) == {None}


def test_summary_counts_complete_requests_over_the_whole_duration():
    summary = report.summarise(OUTCOMES)
    assert (summary["requests"], summary["complete"], summary["errors"]) == (4, 3, {"HTTP 500: no": 1})
    assert summary["duration_s"] == 10.0
    assert (summary["prompt_tokens"], summary["output_tokens"], summary["cached_tokens"]) == (60, 9, 4)
    assert summary["output_tokens_per_s"] == pytest.approx(0.9)
    assert summary["prompt_tokens_per_s"] == pytest.approx(6.0)
    assert summary["requests_per_s"] == pytest.approx(0.3)


def test_latencies_in_milliseconds():
    summary = report.summarise(OUTCOMES)
    assert summary["ttft_ms"]["p50"] == pytest.approx(200)
    assert summary["ttft_ms"]["p95"] == pytest.approx(by_hand([100, 300, 200], 95))
    assert summary["itl_ms"]["p50"] == pytest.approx(by_hand([50, 50, 20, 100, 100], 50))
    assert summary["itl_ms"]["p99"] == pytest.approx(100)
    # The second answer's 20 ms gap carried two tokens: 10 ms a token.
    assert summary["tpot_ms"]["mean"] == pytest.approx((50 + 10 + 100) / 3)
    assert summary["e2e_ms"]["p99"] == pytest.approx(by_hand([250, 400, 1000], 99))
    assert summary["send_delay_ms"]["mean"] == pytest.approx(25)


@pytest.mark.parametrize(
    ("slo_ttft", "slo_itl", "good"),
    [(None, None, 3), (200.5, None, 2), (None, 50.5, 2), (200.5, 50.5, 1), (99, None, 0), (None, 9, 0)],
)
def test_goodput_needs_every_limit_met_and_counts_only_complete_requests(slo_ttft, slo_itl, good):
    summary = report.summarise(OUTCOMES, slo_ttft=slo_ttft, slo_itl=slo_itl)
    assert summary["good"] == good
    assert summary["goodput_requests_per_s"] == pytest.approx(good / 10)


def test_an_answer_of_one_token_has_no_time_per_token_and_meets_any_itl():
    one = Outcome(0.0, 0.0, 1.0, (0.5,), output_tokens=1)
    summary = report.summarise([one], slo_itl=1.0)
    assert summary["tpot_ms"]["mean"] is None
    assert summary["itl_ms"]["p50"] is None
    assert summary["good"] == 1


def test_all_failed_is_a_report_too(tmp_path):
    summary = report.summarise([OUTCOMES[3]], slo_ttft=10)
    assert summary["output_tokens_per_s"] == 0
    console = Console(width=150, record=True, file=(tmp_path / "out").open("w"))
    report.print_run(console, "run", summary)
    assert "1 failed: HTTP 500: no" in console.export_text()
    report.write_json(tmp_path / "x.json", summary)
    assert json.loads((tmp_path / "x.json").read_text())["ttft_ms"]["p50"] is None


def test_errors_that_differ_in_numbers_are_one_kind():
    said = ["HTTP 400: 226 tokens", "HTTP 400: 263 tokens", "HTTP 500: 226 tokens", "cut"]
    assert report.grouped(said) == {"HTTP 400: 226 tokens": 2, "HTTP 500: 226 tokens": 1, "cut": 1}


def test_table_says_throughput_and_goodput(tmp_path):
    console = Console(width=150, record=True, file=(tmp_path / "out").open("w"))
    report.print_run(console, "run", report.summarise(OUTCOMES, slo_ttft=200.5))
    text = console.export_text()
    assert "0.9 output tokens/s" in text
    assert "2 of 4 requests met TTFT <= 200.5 ms" in text
    assert "sent late" in text


def test_json_refuses_nan_and_an_unwritable_place(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        report.write_json(tmp_path / "x.json", {"a": float("nan")})
    with pytest.raises(ValueError, match="cannot write"):
        report.write_json(tmp_path / "no" / "x.json", {})


def test_machine_names_what_it_ran_on_and_hides_the_key():
    about = machine.describe(["--url", "http://x", "--api-key", "sk-secret", "--text", "a b.txt"])
    assert about["cores"] >= 1
    assert about["memory_gib"] > 0
    assert about["cpu"]
    assert about["versions"]["jaxsqueeze"]
    assert about["command"] == """jaxsqueeze bench --url http://x --api-key "$OPENAI_API_KEY" --text 'a b.txt'"""
    assert "secret" not in machine.repeat_command(["--api-key=secret"])
