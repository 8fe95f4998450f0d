"""Prefill and decode speeds from hand-made timelines, every figure computed by hand."""

import pytest

from jaxsqueeze.bench.phases import Emission, medians, phases


def test_one_row():
    timeline = [Emission(0.5, 0, 1), Emission(0.6, 0, 1), Emission(1.0, 0, 4), Emission(1.5, 0, 2, last=True)]
    figures = phases(timeline, rows=1, prompt_tokens=64)
    assert figures["prefill_tokens_per_s"] == pytest.approx(64 / 0.5)
    assert figures["decode_tokens_per_s"] == pytest.approx((1 + 4 + 2) / 1.0)
    assert figures["output_tokens_per_s"] == pytest.approx(8 / 1.5)


def test_decode_counts_only_while_all_rows_decode():
    # Row 0 prefills first and decodes beside row 1's prefill; it ends first, and row 1 goes on alone.
    timeline = [
        Emission(1.0, 0, 1),
        Emission(2.0, 0, 1),
        Emission(2.0, 1, 1),
        Emission(3.0, 0, 1),
        Emission(3.0, 1, 1),
        Emission(4.0, 0, 1, last=True),
        Emission(4.0, 1, 1),
        Emission(5.0, 1, 1),
        Emission(6.0, 1, 1, last=True),
    ]
    figures = phases(timeline, rows=2, prompt_tokens=10)
    assert figures["prefill_tokens_per_s"] == pytest.approx(2 * 10 / 2.0)
    assert figures["decode_tokens_per_s"] == pytest.approx(4 / 2.0)
    assert figures["output_tokens_per_s"] == pytest.approx(9 / 6.0)


def test_an_end_without_a_token_closes_the_window():
    timeline = [Emission(1.0, 0, 1), Emission(2.0, 0, 3), Emission(3.0, 0, 0, last=True)]
    assert phases(timeline, 1, 8)["decode_tokens_per_s"] == pytest.approx(3 / 2.0)


def test_outputs_of_one_token_have_no_decode_speed():
    figures = phases([Emission(1.0, 0, 1, last=True)], 1, 8)
    assert figures["decode_tokens_per_s"] is None
    assert medians([figures, figures])["decode_tokens_per_s"] is None


def test_a_row_without_tokens_is_an_error():
    with pytest.raises(RuntimeError, match="1 of 2 rows"):
        phases([Emission(1.0, 0, 1, last=True)], 2, 8)


def test_medians_are_per_figure():
    assert medians([{"a": 1.0, "b": 9.0}, {"a": 5.0, "b": 1.0}, {"a": 3.0, "b": 2.0}]) == {"a": 3.0, "b": 2.0}
    assert medians([{"a": 1.0}, {"a": 2.0}]) == {"a": 1.5}
