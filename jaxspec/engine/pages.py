"""Who holds which page of the pool: rows, the prefix cache, both, or nobody."""

from __future__ import annotations

from collections.abc import Iterable

SCRATCH_PAGE = 0
"""Written by rows that take part in nothing; in no grant."""


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than were asked for."""


def pages_for(slots: int, page_size: int) -> int:
    """Pages that hold `slots` slots."""
    return -(-slots // page_size)


def grantable(total: int) -> Iterable[int]:
    """Ids of the pages that rows may get, in the order in which they are handed out: all but scratch."""
    return range(SCRATCH_PAGE + 1, total + 1)


class PagePool:
    """Pages 1 … total, each in one class: *free*, *owned* (rows only), *shared* (rows and prefix cache), *cached* (prefix
    cache only). References are the locks: a page goes back to the free ones when its last holder drops it.
    """

    def __init__(self, total: int):
        if total < 1:
            raise ValueError(f"a pool needs at least one page beside scratch; total={total}")
        self.total = total
        self._free = list(grantable(total))[::-1]
        self._rows = [0] * (total + 1)
        self._kept = bytearray(total + 1)
        self.in_cache = 0
        self.cached = 0

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def owned(self) -> int:
        """Pages that only rows hold."""
        return self.total - len(self._free) - self.in_cache

    @property
    def shared(self) -> int:
        """Pages that rows and the prefix cache hold."""
        return self.in_cache - self.cached

    def take(self, count: int) -> list[int]:
        """Grants `count` free pages to a row, or raises OutOfPages and grants none."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.total} are free")
        if not count:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._rows[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Adds a row to pages of the prefix cache."""
        for page in pages:
            if not self._kept[page]:
                raise ValueError(f"page {page} is not in the prefix cache")
            if not self._rows[page]:
                self.cached -= 1
            self._rows[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Drops one row from each page and returns the pages that only the prefix cache holds now."""
        left = []
        rows, kept = self._rows, self._kept
        for page in pages:
            if rows[page] < 1:
                raise ValueError(f"page {page} is held by no row")
            rows[page] -= 1
            if rows[page]:
                continue
            if kept[page]:
                self.cached += 1
                left.append(page)
            else:
                self._free.append(page)
        return left

    def keep(self, page: int) -> None:
        """The prefix cache takes its reference on a page that a row holds."""
        if self._kept[page] or not self._rows[page]:
            raise ValueError(f"page {page} must be held by a row and not yet by the prefix cache")
        self._kept[page] = 1
        self.in_cache += 1

    def drop(self, page: int) -> None:
        """The prefix cache gives up its reference."""
        if not self._kept[page]:
            raise ValueError(f"page {page} is not in the prefix cache")
        self._kept[page] = 0
        self.in_cache -= 1
        if not self._rows[page]:
            self.cached -= 1
            self._free.append(page)

    def is_cached(self, page: int) -> bool:
        """Whether only the prefix cache holds the page."""
        return bool(self._kept[page]) and not self._rows[page]

    def holders(self, page: int) -> int:
        """Rows that hold the page."""
        return self._rows[page]

    def check(self, tables: Iterable[list[int]], cache: Iterable[int]) -> None:
        """Raises AssertionError unless the books agree with the rows' page lists and the pages of the prefix cache."""
        rows, kept = [0] * (self.total + 1), bytearray(self.total + 1)
        for pages in tables:
            assert len(set(pages)) == len(pages), f"a table holds a page twice: {pages}"
            for page in pages:
                rows[page] += 1
        for page in cache:
            assert not kept[page], f"page {page} is in two nodes of the prefix cache"
            kept[page] = 1
        assert rows == self._rows, "the references of rows differ from their tables"
        assert kept == self._kept, "the references of the prefix cache differ from its nodes"
        assert not rows[SCRATCH_PAGE] and not kept[SCRATCH_PAGE], "the scratch page was granted"
        for page, holders in enumerate(rows):
            assert holders < 2 or kept[page], f"page {page} is in {holders} tables but not in the prefix cache"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert all(not rows[page] and not kept[page] for page in free), "a free page is held by someone"
        cached = sum(1 for page, held in enumerate(kept) if held and not rows[page])
        assert (cached, sum(kept)) == (self.cached, self.in_cache), "the counts of cached pages are wrong"
        assert self.free + self.owned + self.shared + self.cached == self.total
        assert len(free) + sum(1 for page in range(self.total + 1) if rows[page] or kept[page]) == self.total
