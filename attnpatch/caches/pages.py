"""Which page belongs to whom: bookkeeping of the host alone, without a tensor.

A page holds the keys and values of ``page_size`` consecutive tokens of one sequence, in every layer. Sequences that
begin alike share pages; a page is written only by a sequence that has it to itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class OutOfPages(RuntimeError):
    """A pool has fewer free pages than a forward needs. Nothing was changed."""


class PageAllocator:
    """A pool of pages, each free or used by one or more sequences.

    Args:
        num_pages: how many there are; their ids are 0 to ``num_pages - 1``.

    Raises:
        ValueError: ``num_pages`` is below 1.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page; got num_pages={num_pages}")
        self.num_pages = num_pages
        self.references = [0] * num_pages
        self._free = list(reversed(range(num_pages)))

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` pages that were free; the caller is their one user.

        Raises:
            OutOfPages: fewer are free.
        """
        if count > self.free:
            raise OutOfPages(f"{count} pages are needed and {self.free} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        self.share(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Count one more user of each of ``pages``."""
        for page in pages:
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Count one user less of each of ``pages``; without a user a page is free."""
        for page in pages:
            self.references[page] -= 1
            if self.references[page] == 0:
                self._free.append(page)


class PageTable:
    """The pages of a batch of sequences, all of the same number of tokens.

    Its pages go back to the pool when it is deleted.

    Args:
        allocator: the pool; several tables may share it.
        page_size: tokens per page.

    Raises:
        ValueError: ``page_size`` is below 1.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self.allocator, self.page_size = allocator, page_size
        self.rows: list[list[int]] = []
        self.length = 0
        self.version = 0  # of the rows: counts their changes
        if page_size < 1:
            raise ValueError(f"a page holds at least one token; got page_size={page_size}")

    def __del__(self) -> None:
        self.crop(0)

    def blocks(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens of one sequence."""
        return -(-tokens // self.page_size)

    def needed(self, batch: int, new: int) -> int:
        """Free pages that :meth:`reserve` takes."""
        blocks = self.blocks(self.length + new)
        if not self.length:
            return batch * blocks
        return len(self._sharing_a_tail()) + sum(max(blocks - len(row), 0) for row in self.rows)

    def reserve(self, batch: int, new: int) -> list[tuple[int, int]]:
        """Give each sequence pages of its own for ``new`` tokens more.

        A last page that is partly filled and shared is replaced by a copy. The length stays: see :meth:`advance`.

        Returns:
            Pairs ``(page, copy)``: what the caller has to copy before anything is written.

        Raises:
            OutOfPages: the pool has too few free pages; nothing was changed.
            ValueError: the table holds another number of sequences.
        """
        self._check_batch(batch)
        if not self.length:
            self._replace([[] for _ in range(batch)])
        needed, free = self.needed(batch, new), self.allocator.free
        if needed > free:
            raise OutOfPages(
                f"{new} more tokens of {batch} sequences, which hold {self.length} each, need {needed} pages of "
                f"{self.page_size} tokens; {free} of {self.allocator.num_pages} are free. Make the cache with more "
                "num_pages, reset() a cache that shares the pool, or pass on_full= to make room"
            )
        copies = [self._copy_tail(row) for row in self._sharing_a_tail()]
        for row in self.rows:
            row += self.allocator.take(self.blocks(self.length + new) - len(row))
        self.version += needed > 0
        return copies

    def advance(self, new: int) -> None:
        """Count ``new`` tokens as stored."""
        self.length += new

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens; pages without a token go back to the pool."""
        self.length = min(self.length, length)
        self._replace([row[: self.blocks(self.length)] for row in self.rows] if self.length else [])

    def select(self, rows: Sequence[int]) -> None:
        """Become a batch of copies of these ``rows``, which may repeat; every page is shared, nothing is copied.

        Raises:
            IndexError: no such row.
        """
        self._replace(self._stored(rows))
        self.length = self.length if self.rows else 0

    def fork(self, rows: Sequence[int]) -> PageTable:
        """A table of its own with copies of these ``rows``; every page is shared.

        Raises:
            IndexError: no such row.
        """
        child = PageTable(self.allocator, self.page_size)
        child._replace(self._stored(rows))
        child.length = self.length if child.rows else 0
        return child

    def _stored(self, rows: Sequence[int]) -> list[list[int]]:
        """The pages of ``rows`` that hold tokens: what is merely reserved is nobody else's."""
        outside = [row for row in rows if not 0 <= row < len(self.rows)]
        if outside:
            raise IndexError(f"row {outside[0]} is not one of the {len(self.rows)} sequences of the cache")
        return [self.rows[row][: self.blocks(self.length)] for row in rows]

    def _replace(self, rows: list[list[int]]) -> None:
        """Exchange all rows, so that a page which old and new rows use is never free in between."""
        for row in rows:
            self.allocator.share(row)
        for row in self.rows:
            self.allocator.release(row)
        self.rows = rows
        self.version += 1

    def _sharing_a_tail(self) -> list[int]:
        """Rows whose partly filled last page others use: all of them, but the last when no other table does."""
        if self.length % self.page_size == 0:
            return []
        users: dict[int, int] = {}
        sharing = []
        for i, row in enumerate(self.rows):
            page = row[self.length // self.page_size]
            users.setdefault(page, self.allocator.references[page])
            if users[page] > 1:
                sharing.append(i)
                users[page] -= 1
        return sharing

    def _copy_tail(self, row: int) -> tuple[int, int]:
        block = self.length // self.page_size
        page, (copy,) = self.rows[row][block], self.allocator.take(1)
        self.allocator.release([page])
        self.rows[row][block] = copy
        return page, copy

    def _check_batch(self, batch: int) -> None:
        if self.length and batch != len(self.rows):
            raise ValueError(
                f"the cache holds {self.length} tokens of {len(self.rows)} sequences and was given {batch}; "
                "reset() it first, or select the rows with batch_select_indices or batch_repeat_interleave"
            )
