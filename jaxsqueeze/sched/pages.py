"""Pages of the KV pool, on the host: who holds which page, one page table per cache group.

A page holds ``page_size`` tokens of every layer of its group. Page 0 is never handed out: masked rows of a device step
write there. Position ``t`` of slot ``s`` lives in page ``table[s, t // page_size - base[s]]`` at ``t % page_size``.

A full-attention group keeps all pages of a sequence (``base`` stays 0). A sliding-window group gives back the pages
that lie wholly behind the window of the next query, and ``base`` counts them. Device steps run in the order of their
plans, so a page may change hands as soon as the last plan that reads it is made, finished on the device or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxsqueeze.types import CacheGroup, GroupTables


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold ``tokens`` tokens from a page's start."""
    return -(-tokens // page_size)


def table_width(
    group: CacheGroup, *, page_size: int, max_model_len: int, max_step_tokens: int, decode_steps: int
) -> int:
    """Columns of a group's page table: the most pages one sequence of the group ever holds.

    Behind a window a step touches ``window - 1`` tokens before its first query and its own tokens. A run of ``n``
    tokens that starts anywhere in a page touches at most ``ceil((n - 1) / page_size) + 1`` pages.
    """
    whole = pages_for(max_model_len, page_size)
    if group.window is None:
        return whole
    run = group.window - 1 + max(max_step_tokens, decode_steps)
    return min(whole, pages_for(run - 1, page_size) + 1)


class PagePool:
    """Free list and reference counts of one group's pages. A page with no reference is free."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a page pool needs at least 2 pages (page 0 is reserved), got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # taken from the end: low pages first, then the latest freed
        self._refs = [0] * num_pages

    @property
    def total(self) -> int:
        """Pages that can be handed out."""
        return self.num_pages - 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    def take(self, count: int) -> list[int]:
        """``count`` free pages, each with one reference. The caller has checked ``free``."""
        assert 0 < count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self._refs[page] = 1
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Drops one reference of each page."""
        for page in reversed(pages):
            self._refs[page] -= 1
            assert self._refs[page] >= 0, f"page {page} given back twice"
            if not self._refs[page]:
                self._free.append(page)

    def check_integrity(self, holders: np.ndarray) -> None:
        """``holders`` i32[num_pages]: how many table entries name each page."""
        assert holders[0] == 0, "page 0 is in a table"
        assert holders.tolist() == self._refs, "reference counts differ from the tables"
        assert 0 not in self._free, "page 0 is in the free list"
        assert len(set(self._free)) == len(self._free), "a page is twice in the free list"
        assert not any(self._refs[page] for page in self._free), "a page in use is in the free list"
        assert len(self._free) + sum(refs > 0 for refs in self._refs) == self.total, "a page is lost"


class PageTable:
    """The page table of one cache group, and its pool."""

    def __init__(self, group: CacheGroup, *, num_pages: int, max_slots: int, page_size: int, width: int) -> None:
        self.group = group
        self.page_size = page_size
        self.width = width
        self.pool = PagePool(num_pages)
        self._table = np.zeros((max_slots + 1, width), np.int32)
        # Per slot, as Python ints: they are read for every row of every step.
        self._base = [0] * (max_slots + 1)  # pages given back behind the window
        self._count = [0] * (max_slots + 1)  # pages held
        self._end = [0] * (max_slots + 1)  # first position without a place

    def peak(self, tokens: int) -> int:
        """The most pages a sequence holds while ``tokens`` of its tokens are written."""
        return min(pages_for(tokens, self.page_size), self.width)

    def longest(self) -> int | None:
        """The most tokens a sequence can write when it has the pool for itself; None: no limit."""
        fits_any = self.group.window is not None and self.pool.total >= self.width
        return None if fits_any else self.pool.total * self.page_size

    def held(self, slot: int) -> int:
        return self._count[slot]

    def tail_tokens(self, slot: int, tokens: int) -> int:
        """Token places of the slot's pages that lie after its ``tokens`` tokens."""
        return self._end[slot] - tokens

    def missing(self, slot: int, end: int) -> int:
        """Pages to add so that every position before ``end`` has a place."""
        return 0 if end <= self._end[slot] else pages_for(end - self._end[slot], self.page_size)

    def free_behind(self, slot: int, first_query: int) -> None:
        """Gives back the pages that no query from position ``first_query`` on can see."""
        window = self.group.window
        if window is None or first_query - window + 1 < (self._base[slot] + 1) * self.page_size:
            return
        drop = (first_query - window + 1) // self.page_size - self._base[slot]
        row, count = self._table[slot], self._count[slot]
        assert drop <= count, f"slot {slot} holds {count} pages, {drop} are behind the window"
        self.pool.give_back(row[:drop].tolist())
        row[: count - drop] = row[drop:count].copy()
        row[count - drop : count] = 0
        self._base[slot] += drop
        self._count[slot] -= drop

    def extend(self, slot: int, pages: int) -> None:
        """Adds free pages at the end of a slot's row."""
        if pages:
            count = self._count[slot]
            assert count + pages <= self.width, f"slot {slot} would hold {count + pages} pages of {self.width}"
            self._table[slot, count : count + pages] = self.pool.take(pages)
            self._count[slot] += pages
            self._end[slot] += pages * self.page_size

    def release(self, slot: int) -> None:
        """Gives back all pages of a slot."""
        count = self._count[slot]
        if count:
            self.pool.give_back(self._table[slot, :count].tolist())
            self._table[slot, :count] = 0
        self._base[slot] = self._count[slot] = self._end[slot] = 0

    def snapshot(self) -> GroupTables:
        return GroupTables(self._table.copy(), np.asarray(self._base, np.int32))

    def check_integrity(self, tokens_of_slot: dict[int, int]) -> None:
        """``tokens_of_slot``: tokens written by the plans made so far, for each slot in use."""
        for slot, count in enumerate(self._count):
            row = self._table[slot]
            assert self._end[slot] == (self._base[slot] + count) * self.page_size, f"slot {slot}: page count is off"
            assert (row[:count] > 0).all(), f"slot {slot} holds page 0"
            assert (row[count:] == 0).all(), f"slot {slot} names pages it does not hold"
            if slot not in tokens_of_slot:
                assert count == 0, f"slot {slot} is free but holds pages"
                assert self._base[slot] == 0, f"slot {slot} is free but has a base"
                continue
            tokens = tokens_of_slot[slot]
            tail = self.tail_tokens(slot, tokens)
            assert 0 <= tail < self.page_size, f"slot {slot}: {tail} places after its last token"
            behind = 0 if self.group.window is None else max(0, tokens - self.group.window + 1)
            assert self._base[slot] * self.page_size <= behind, f"slot {slot} gave back a page still seen"
        self.pool.check_integrity(held_counts(self._table, self.pool.num_pages))


def held_counts(table: np.ndarray, num_pages: int) -> np.ndarray:
    """How many entries of a table name each page; i32[num_pages], page 0 (unused entries) counted as 0."""
    counts = np.bincount(table.ravel(), minlength=num_pages).astype(np.int32)
    counts[0] = 0
    return counts


def pages_fit(tables: Sequence[PageTable], needs: Sequence[int]) -> bool:
    return all(need <= table.pool.free for table, need in zip(tables, needs, strict=True))
