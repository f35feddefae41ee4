"""Writes to rings, in the interpreter and in plain torch: each row holds the last token of its position."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from attnpatch import ops
from attnpatch.kernels.cache_write import launch, reference
from attnpatch.writing import CacheWrite, check


def by_triton(write, ring_from):
    check(write, ring_from)
    launch.cache_write(write, ring_from)(*write)


def by_operator(write, ring_from):
    ops.cache_write(*write, ring_from=ring_from)


RUNS = {
    "triton": by_triton,
    "torch": lambda write, start: reference.cache_write(*write, ring_from=start),
    "op": by_operator,
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@settings(max_examples=25, deadline=None)
@given(
    start=st.sampled_from([0, 4]),
    size=st.integers(1, 20),
    lengths=st.lists(st.integers(1, 45), min_size=1, max_size=5),
)
def test_holds_the_first_and_the_last(run, start, size, lengths):
    k_ring, v_ring = torch.full((2, 3, start + size, 8), -1.0), torch.full((2, 3, start + size, 16), -1.0)
    expected, position = torch.full((start + size,), -1.0), 0
    for n in lengths:
        tokens = torch.arange(position, position + n).float()
        k, v = (tokens[:, None].expand(2, 3, n, width) for width in (8, 16))
        run(CacheWrite(k_ring, v_ring, k, v, torch.tensor(position)), start)
        for p in range(position, position + n):
            expected[p if p < start else start + (p - start) % size] = p
        position += n
    for ring in (k_ring, v_ring):
        assert torch.equal(ring, expected[:, None].expand_as(ring))


def write(positions, table=None):
    caches = [torch.zeros(1, 2, 6, 8) for _ in range(2)]
    return CacheWrite(*caches, torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), positions, table)


REFUSED = {
    "positions of each token": (write(torch.arange(3)), 4),
    "pages": (write(torch.tensor(0), torch.zeros(1, 1, dtype=torch.int32)), 4),
    "no row for it": (write(torch.tensor(0)), 6),
}


@pytest.mark.parametrize(("given", "start"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_ring(given, start):
    with pytest.raises(ValueError, match=f"ring_from={start} needs positions of shape"):
        by_operator(given, start)


def test_opcheck():
    torch.library.opcheck(torch.ops.attnpatch.cache_write.default, tuple(write(torch.tensor(5))), {"ring_from": 4})
