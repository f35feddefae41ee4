"""The page allocator against plain lists: what a sequence reads, who uses a page, and nothing lost or used twice."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch.caches.pages import OutOfPages, PageAllocator, PageTable

ACTIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 3), st.integers(1, 3), st.integers(1, 5)),
    st.tuples(st.just("crop"), st.integers(0, 3), st.integers(0, 12)),
    st.tuples(st.just("select"), st.integers(0, 3), st.lists(st.integers(0, 3), max_size=4)),
    st.tuples(st.just("fork"), st.integers(0, 3), st.lists(st.integers(0, 3), max_size=3)),
    st.tuples(st.just("delete"), st.integers(0, 3)),
    st.tuples(st.just("fail"), st.integers(0, 3), st.integers(1, 5)),
)


class Machine:
    """Tables over one pool, the memory they index, and the token lists they stand for."""

    def __init__(self, num_pages, page_size):
        self.pool = PageAllocator(num_pages)
        self.memory = [[None] * page_size for _ in range(num_pages)]
        self.tables, self.expected = [PageTable(self.pool, page_size)], [[]]
        self.clock = 0

    def run(self, action, which, *arguments):
        getattr(self, action)(which % len(self.tables), *arguments)
        self.check()

    def append(self, which, batch, new):
        table, rows = self.tables[which], self.expected[which]
        batch = len(rows) if table.length else batch
        table.crop(table.length)  # what a failed forward left
        before = ([list(row) for row in table.rows], self.pool.free, list(self.pool.references))
        needed = table.needed(batch, new)
        try:
            copies = table.reserve(batch, new)
        except OutOfPages:
            assert needed > before[1]
            assert (table.rows if table.length else [], self.pool.free, self.pool.references) == before
            return
        assert needed <= before[1]
        assert self.pool.free == before[1] - needed
        for page, copy in copies:
            self.memory[copy] = list(self.memory[page])
        if not table.length:
            rows = self.expected[which] = [[] for _ in range(batch)]
        for row, tokens in zip(table.rows, rows, strict=True):
            for position in range(table.length, table.length + new):
                page = row[position // table.page_size]
                assert self.pool.references[page] == 1, "a shared page is written"
                self.memory[page][position % table.page_size] = self.clock
                tokens.append(self.clock)
                self.clock += 1
        table.advance(new)

    def fail(self, which, new):
        """A forward that reserved its pages and never ended."""
        table = self.tables[which]
        if table.length and table.needed(len(table.rows), new) <= self.pool.free:
            for page, copy in table.reserve(len(table.rows), new):
                self.memory[copy] = list(self.memory[page])

    def crop(self, which, length):
        self.tables[which].crop(length)
        kept = self.tables[which].length
        self.expected[which] = [tokens[:kept] for tokens in self.expected[which]] if kept else []

    def select(self, which, rows):
        rows = [row for row in rows if row < len(self.expected[which])]
        self.tables[which].select(rows)
        self.expected[which] = [list(self.expected[which][row]) for row in rows]

    def fork(self, which, rows):
        rows = [row for row in rows if row < len(self.expected[which])]
        self.tables.append(self.tables[which].fork(rows))
        self.expected.append([list(self.expected[which][row]) for row in rows])

    def delete(self, which):
        if len(self.tables) > 1:
            del self.tables[which], self.expected[which]

    def check(self):
        for table, rows in zip(self.tables, self.expected, strict=True):
            if table.length:
                assert [self.read(table, row) for row in table.rows] == rows
            else:
                assert not any(rows)
        users = Counter(page for table in self.tables for row in table.rows for page in row)
        assert self.pool.references == [users[page] for page in range(self.pool.num_pages)]
        assert sorted(self.pool._free) == [page for page in range(self.pool.num_pages) if not users[page]]

    def read(self, table, row):
        return [self.memory[row[i // table.page_size]][i % table.page_size] for i in range(table.length)]


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.lists(ACTIONS, max_size=25))
def test_any_sequence_of_operations(num_pages, page_size, actions):
    machine = Machine(num_pages, page_size)
    for action in actions:
        machine.run(*action)
    machine.tables.clear()
    assert machine.pool.free == num_pages


def filled(num_pages=8, page_size=4, batch=2, tokens=6):
    table = PageTable(PageAllocator(num_pages), page_size)
    table.reserve(batch, tokens)
    table.advance(tokens)
    return table


def test_a_fork_copies_the_partly_filled_page_alone():
    table = filled(batch=1)
    fork = table.fork([0])
    assert fork.rows == table.rows
    assert table.allocator.free == 6
    (page, copy), *rest = fork.reserve(1, 1)
    assert (page, rest) == (table.rows[0][1], [])
    assert fork.rows[0] == [table.rows[0][0], copy]
    assert table.reserve(1, 1) == [], "the page has one user left"


def test_a_full_page_stays_shared():
    table = filled(batch=1, tokens=8)
    fork = table.fork([0])
    assert fork.reserve(1, 1) == []
    assert fork.rows[0][:2] == table.rows[0]


def test_the_last_row_of_a_repeated_batch_keeps_the_page():
    table = filled(batch=1)
    page = table.rows[0][1]
    table.select([0, 0, 0])
    copies = table.reserve(3, 1)
    assert [source for source, _ in copies] == [page, page]
    assert table.rows[2][1] == page


def test_out_of_pages_names_needed_and_free_pages_and_the_fix():
    table = filled(num_pages=5)
    rows = [list(row) for row in table.rows]
    with pytest.raises(OutOfPages, match=r"need 2 pages of 4 tokens; 1 of 5 are free\. Make .* more num_pages"):
        table.reserve(2, 3)
    assert (table.rows, table.length, table.allocator.free) == (rows, 6, 1)


def test_copies_count_as_needed_pages():
    table = filled(num_pages=4, batch=1)
    table.select([0, 0, 0, 0])
    assert table.needed(4, 1) == 3
    with pytest.raises(OutOfPages, match="need 3 pages"):
        table.reserve(4, 1)


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0)])
def test_sizes_below_one(num_pages, page_size):
    with pytest.raises(ValueError, match="at least one"):
        PageTable(PageAllocator(num_pages), page_size)


def test_another_batch():
    with pytest.raises(ValueError, match="holds 6 tokens of 2 sequences and was given 3; reset"):
        filled().reserve(3, 1)


def test_a_row_that_is_not_there():
    with pytest.raises(IndexError, match="row 2 is not one of the 2 sequences"):
        filled().fork([2])
