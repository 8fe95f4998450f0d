"""Page pools and tables alone."""

from __future__ import annotations

import numpy as np
import pytest

from jaxsqueeze.sched.pages import PagePool, PageTable, table_width
from tests.sched.build_traffic import FULL, window


def make_table(group=FULL, num_pages=20, page_size=4, width=10, max_slots=3) -> PageTable:
    return PageTable(group, num_pages=num_pages, max_slots=max_slots, page_size=page_size, width=width)


def test_a_pool_hands_out_every_page_but_0_once():
    pool = PagePool(6)
    first, second = pool.take(2), pool.take(3)
    assert sorted(first + second) == [1, 2, 3, 4, 5]
    assert (pool.free, pool.used, pool.total) == (0, 5, 5)
    pool.give_back(first)
    assert sorted(pool.take(2)) == sorted(first)
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        pool.take(1)


def test_a_page_cannot_be_given_back_twice():
    pool = PagePool(4)
    pages = pool.take(1)
    pool.give_back(pages)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back(pages)


def test_a_pool_of_page_0_alone_is_refused():
    with pytest.raises(ValueError, match="at least 2 pages"):
        PagePool(1)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9])
def test_pages_hold_exactly_the_tokens(tokens):
    table = make_table()
    table.extend(1, table.missing(1, tokens))
    assert table.held(1) == -(-tokens // 4)
    assert table.missing(1, table.held(1) * 4) == 0
    assert table.missing(1, table.held(1) * 4 + 1) == 1
    table.check_integrity({1: tokens})
    table.release(1)
    table.check_integrity({})
    assert table.pool.used == 0
    assert not table.snapshot().table.any()


@pytest.mark.parametrize("size", [1, 3, 4, 5, 9])
def test_a_window_keeps_the_pages_its_next_query_sees_and_no_other(size):
    table, page_of = make_table(window(size), width=6), {}
    for query in range(40):
        table.free_behind(2, query)
        table.extend(2, table.missing(2, query + 1))
        snapshot = table.snapshot()
        base = int(snapshot.base[2])
        row = snapshot.table[2]
        seen = sorted({position // 4 for position in range(max(0, query - size + 1), query + 1)})
        assert [base + column for column in np.flatnonzero(row)] == seen
        for page in seen:  # a token never moves
            assert page_of.setdefault(page, row[page - base]) == row[page - base]
        table.check_integrity({2: query + 1})


def test_a_snapshot_does_not_change_afterwards():
    table = make_table(window(4))
    table.extend(0, 2)
    before = table.snapshot()
    kept = before.table.copy(), before.base.copy()
    table.free_behind(0, 8)
    table.extend(0, 1)
    table.release(0)
    assert np.array_equal(before.table, kept[0])
    assert np.array_equal(before.base, kept[1])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("size", [1, 2, 4, 15, 16, 17, 33])
@pytest.mark.parametrize(("step_tokens", "decode_steps"), [(16, 1), (32, 4), (16, 40)])
def test_table_width_is_the_most_pages_that_any_run_touches(page_size, size, step_tokens, decode_steps):
    width = table_width(
        window(size), page_size=page_size, max_model_len=10_000, max_step_tokens=step_tokens, decode_steps=decode_steps
    )
    run = max(step_tokens, decode_steps)
    touched = [
        (query + run - 1) // page_size - max(0, query - size + 1) // page_size + 1
        for query in range(4 * page_size + size)
    ]
    assert width == max(touched)


def test_table_width_of_a_full_group_holds_the_longest_sequence():
    sizes = {"page_size": 16, "max_step_tokens": 64, "decode_steps": 4}
    assert table_width(FULL, max_model_len=100, **sizes) == 7
    assert table_width(FULL, max_model_len=96, **sizes) == 6
    assert table_width(window(4096), max_model_len=100, **sizes) == 7  # a window never needs more than full attention


def break_reference_count(table: PageTable) -> None:
    table.pool._refs[int(table._table[0, 0])] += 1


def break_free_list(table: PageTable) -> None:
    table.pool._free.pop()


def share_a_page(table: PageTable) -> None:
    table._table[1, 0] = table._table[0, 0]


def name_page_0(table: PageTable) -> None:
    table._table[0, 0] = 0


def leave_a_page_behind(table: PageTable) -> None:
    table._table[2, 0] = table.pool.take(1)[0]


@pytest.mark.parametrize(
    "damage", [break_reference_count, break_free_list, share_a_page, name_page_0, leave_a_page_behind]
)
def test_check_integrity_notices(damage):
    table = make_table()
    table.extend(0, 2)
    table.extend(1, 2)
    table.check_integrity({0: 7, 1: 8})
    damage(table)
    with pytest.raises(AssertionError):
        table.check_integrity({0: 7, 1: 8})
