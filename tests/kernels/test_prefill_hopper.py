"""What triton.prefill_hopper decides on the host: which key blocks a tile sees, who computes it, what it refuses.

The kernel itself needs the chip: tests/gpu/test_prefill_hopper_gpu.py; its compiled code is looked at in test_sass.py.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch.kernels.common import support
from attnpatch.kernels.prefill_hopper import backend
from attnpatch.kernels.prefill_hopper.kernel import key_blocks, seen_keys
from attnpatch.kernels.prefill_hopper.ranges import tile_ranges
from attnpatch.kernels.prefill_hopper.schedule import assign
from attnpatch.testing.inputs import random_call

WINDOW = st.none() | st.integers(0, 70)


@given(
    m_block=st.integers(0, 6),
    offset=st.integers(-60, 60),
    seqlen_q=st.integers(1, 100),
    seqlen_k=st.integers(1, 150),
    window_left=WINDOW,
    window_right=WINDOW,
)
def test_key_blocks_against_every_score(m_block, offset, seqlen_q, seqlen_k, window_left, window_right):
    """Blocks that are left out hide everything, those called full hide nothing."""
    block_m, block_n = 16, 8
    m = m_block * block_m % max(seqlen_q, 1) // block_m * block_m
    band = (offset, seqlen_q, seqlen_k, window_left, window_right)
    lo, full_lo, full_hi, hi = seen_keys.fn(m, *band, block_m)
    last, num, right, left = key_blocks.fn(lo, full_lo, full_hi, hi, block_n)
    position = np.arange(m, min(m + block_m, seqlen_q))[:, None] + offset
    keys = np.arange((seqlen_k + block_n - 1) // block_n * block_n)[None, :]
    visible = np.broadcast_to(keys < seqlen_k, (len(position), keys.shape[1])).copy()
    if window_left is not None:
        visible &= keys >= position - window_left
    if window_right is not None:
        visible &= keys <= position + window_right
    seen_by_some = np.flatnonzero(visible.any(0))
    assert ((lo <= seen_by_some) & (seen_by_some < hi)).all()
    walked = [last - j for j in range(num)]
    assert num >= 1
    assert min(walked) >= 0
    assert max(walked) * block_n < seqlen_k
    for block in range(keys.shape[1] // block_n):
        seen = visible[:, block * block_n : (block + 1) * block_n]
        if block not in walked:
            assert not seen.any()
        elif right <= walked.index(block) < num - left:
            assert seen.all()


@given(
    costs=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    batch=st.integers(1, 4),
    num_heads=st.integers(1, 20),
    section=st.integers(1, 50),
    programs=st.integers(1, 24),
)
def test_every_tile_has_one_program(costs, batch, num_heads, section, programs):
    tiles, counts = assign(costs, batch, num_heads, section, programs)
    assert (tiles[:, -1] == 0).all(), "a program reads on by one"
    dealt = sorted(int(tile) for row, n in zip(tiles, counts, strict=True) for tile in row[:n])
    blocks = range(len(costs))
    assert dealt == [b << 48 | h << 32 | block for b in range(batch) for h in range(num_heads) for block in blocks]
    loads = [sum(costs[tile & 0xFFFFFFFF] for tile in row[:n]) for row, n in zip(tiles, counts, strict=True)]
    assert max(loads) <= sum(loads) / programs + max(costs), "nobody gets a tile while another has less to do"


def test_programs_have_as_much_to_do():
    costs = [1.5 + key_blocks.fn(*seen_keys.fn(m, 0, 4096, 4096, None, 0, 128), 128)[1] for m in range(0, 4096, 128)]
    tiles, counts = assign(costs, 4, 32, 32, 132)
    loads = [sum(costs[tile & 0xFFFFFFFF] for tile in row[:n]) for row, n in zip(tiles, counts, strict=True)]
    assert max(loads) * 132 / sum(loads) < 1.01


REFUSED = {
    "float32": ({"dtype": torch.float32}, "float32 is multiplied exactly by triton.prefill"),
    "mask": ({"attn_mask": torch.ones(1, 1, 9, 9, dtype=torch.bool)}, "a mask is read by triton.prefill"),
    "rows of 18 bytes": ({"head_dim": 9}, "is nothing that TMA reads"),
}


@pytest.mark.parametrize(("case", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses(monkeypatch, case, reason):
    monkeypatch.setattr(support, "capability", lambda device: (9, 0))
    call = random_call(**{"batch": 1, "num_heads": 2, "seqlen_q": 9, "dtype": torch.float16, **case})
    assert reason in backend._refuses(call)


@given(
    seqlen_q=st.integers(1, 40),
    seqlen_k=st.integers(1, 50),
    offset=st.integers(-20, 40),
    window=st.tuples(WINDOW, WINDOW),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_ranges_against_every_row(seqlen_q, seqlen_k, offset, window, seed):
    """In the interpreter."""
    generator = torch.Generator().manual_seed(seed)
    first, stop = torch.randint(0, seqlen_k + 1, (2, 1, 1, seqlen_q), generator=generator)
    plain = torch.randint(0, 2, (1, 1, seqlen_q), generator=generator)
    bounds = torch.stack([-first, stop, plain], -1).int().expand(1, 2, seqlen_q, 3)
    sizes = {"num_heads": 2, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": 16}
    call = random_call(**sizes, key_bounds=bounds, q_offset=offset, window_left=window[0], window_right=window[1])
    found = tile_ranges(call, 16)
    assert found.shape[:2] == (1, 1), "bounds that all heads share are read once"
    position = torch.arange(seqlen_q) + offset
    low, high = first[0, 0], stop[0, 0]
    low = low if window[0] is None else torch.maximum(low, position - window[0])
    high = high if window[1] is None else torch.minimum(high, position + window[1] + 1)
    high = high.clamp(min=0)
    for block, rows in enumerate(range(0, seqlen_q, 16)):
        tile = slice(rows, rows + 16)
        edges = [low[tile].min(), low[tile].max(), high[tile].min(), high[tile].max(), plain[0, 0, tile].min()]
        assert found[0, 0, block, :5].tolist() == [int(x) for x in edges]
        seen = torch.zeros(seqlen_k, dtype=torch.bool)
        for n in range(*tile.indices(seqlen_q)):
            seen[low[n] : max(low[n], high[n])] = True
        if found[0, 0, block, 5]:
            assert seen[low[tile].min() : high[tile].max()].all(), "no gap"


def test_what_it_takes(monkeypatch):
    monkeypatch.setattr(support, "capability", lambda device: (9, 0))
    call = random_call(batch=1, num_heads=2, seqlen_q=9, head_dim=64, dtype=torch.bfloat16, window_right=0)
    assert backend._refuses(call) is None
    assert backend._refuses(call._replace(q_offset=5, k=call.k[:, :, :4], v=call.v[:, :, :4])) is None
    monkeypatch.setattr(support, "capability", lambda device: (10, 0))
    assert backend._refuses(call) == "compute capability 10.0 is not 9.0, whose warpgroup products it is written for"
