"""How keys are shared among programs: from shapes on the host, and by each program from the lengths."""

from collections import defaultdict

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch.kernels.decode import configs
from attnpatch.kernels.decode.plan import plan_of_program, share_of, splits_of_row
from attnpatch.testing.inputs import packed, random_call


def random_step(**case):
    defaults = {"num_kv_heads": 1, "seqlen_q": 1, "seqlen_k": 130, "head_dim": 1, "dtype": torch.float16}
    return random_call(**{**defaults, **case})


def planned(call):
    return configs.choose_plan(call, configs.choose_config(call))


def test_a_plan_does_not_depend_on_the_offset():
    """It comes from shapes: a captured graph replays while the valid length grows."""
    short, long = (random_step(q_offset=offset, window_right=0) for offset in (torch.tensor(3), torch.tensor(129)))
    assert planned(short) == planned(long)


SPLIT_COUNTS = {
    "a block": ({"seqlen_k": 64}, 1),
    "a split per block": ({"seqlen_k": 200}, 4),
    "the multiprocessors are filled first": ({"seqlen_k": 4096, "num_kv_heads": 4, "batch": 2}, 32),
    "two programs each": ({"seqlen_k": 131072, "num_kv_heads": 4, "batch": 2}, 33),
    "whole blocks": ({"seqlen_k": 131072}, 256),
    "the chip is full": ({"seqlen_k": 4096, "num_kv_heads": 4, "batch": 40}, 1),
    "the window limits": ({"seqlen_k": 131072, "window_left": 1023, "window_right": 0}, 16),
}


@pytest.mark.parametrize(("case", "expected"), SPLIT_COUNTS.values(), ids=SPLIT_COUNTS)
def test_split_counts(chip, case, expected):
    chip(132)
    assert planned(random_step(**case)).num_splits == expected


MANY_PROGRAMS = configs.DecodeConfig(4, 64, 1, 3, 12)
MANY_SPLITS = {
    "a block each for a program per scheduler": ({"seqlen_k": 4096}, 64),
    "more programs where splits have 256 keys": ({"seqlen_k": 32768}, 128),
    "as many as fit": ({"seqlen_k": 131072}, 187),  # of 11 blocks; 198 would fit
    "at most MAX_SPLITS": ({"seqlen_k": 67584, "num_kv_heads": 1}, 264),
}


@pytest.mark.parametrize(("case", "expected"), MANY_SPLITS.values(), ids=MANY_SPLITS)
def test_split_counts_of_many_programs(chip, case, expected):
    chip(132)
    call = random_step(**{"batch": 1, "num_heads": 8, "num_kv_heads": 8, **case})
    assert configs.choose_plan(call, MANY_PROGRAMS).num_splits == expected


CONFIG = configs.DecodeConfig(16, 64, 4, 1)


@triton.jit
def _programs(q_offset, offset_stride, cu_q, cu_k, sizes, plan, windows, found, G: tl.constexpr, B: tl.constexpr):
    """What each program does: sequence, KV head, tile, split, splits, and its share of 1000 keys."""
    window_left, window_right = windows
    b, h, tile, split, splits = plan_of_program(
        *(q_offset, offset_stride, cu_q, cu_k, sizes[0], sizes[1], sizes[2], sizes[3]),
        *(window_left, window_right, plan[0], plan[1], plan[2], plan[3], G, 16, 64, B),
    )
    row = found + tl.program_id(0) * 6
    tl.store(row, b)
    tl.store(row + 1, h)
    tl.store(row + 2, tile)
    tl.store(row + 3, split)
    tl.store(row + 4, splits)
    tl.store(row + 5, share_of(1000, splits, plan[2], plan[3], 64))


@triton.jit
def _merged(q_offset, offset_stride, cu_q, cu_k, sizes, plan, windows, found, G: tl.constexpr, B: tl.constexpr):
    """How many splits the merge of each row reads."""
    window_left, window_right = windows
    row = tl.program_id(0)
    b, i = row // sizes[2], row % sizes[2]
    splits = splits_of_row(
        *(b, i, q_offset, offset_stride, cu_q, cu_k, sizes[0], sizes[2], sizes[3]),
        *(window_left, window_right, plan[0], plan[1], plan[2], plan[3], G, 16, 64, B),
    )
    tl.store(found + row, splits)


def run(kernel, grid, call, plan, width):
    found = torch.full((grid, width), -9, dtype=torch.int32)
    sizes = (call.batch, call.num_kv_heads, call.q.shape[2], call.seqlen_k)
    numbers = (plan.num_splits, plan.parts, plan.least_share, plan.most_share)
    windows = (call.window_left, call.window_right)
    lengths = (call.q_offset, call.q_offset.stride(0), call.cu_seqlens_q, call.cu_seqlens_k)
    kernel[(grid,)](*lengths, sizes, numbers, windows, found, call.group_size, plan.block_b)
    return found.tolist()


def expected_tiles(call):
    """(sequence, KV head, tile) of every tile that has a row."""
    ends = [0, *([call.seqlen_q] * call.batch)] if call.cu_seqlens_q is None else None
    rows = ends[1:] if ends else call.cu_seqlens_q.diff().tolist()
    tiles = [-(-n * call.group_size // CONFIG.BLOCK_M) for n in rows]
    return {(b, h, tile) for b, n in enumerate(tiles) for tile in range(n) for h in range(call.num_kv_heads)}


def check_plan(call, num_splits=0):
    """Every split of every tile has one program, and a merge reads as many as there are."""
    plan = configs.choose_plan(call, CONFIG, num_splits)
    splits, of_tile = defaultdict(list), {}
    for b, h, tile, split, of, share in run(_programs, plan.programs, call, plan, 6):
        if b < call.batch:
            splits[b, h, tile].append(split)
            assert of_tile.setdefault((b, h, tile), of) == of
            assert 1 <= of <= plan.num_splits
            assert of * share >= 1000 or plan.most_share < 1000
    assert set(splits) == expected_tiles(call)
    assert all(sorted(found) == list(range(of_tile[tile])) for tile, found in splits.items())
    check_merge(call, plan, {b: of for (b, _, _), of in of_tile.items()})


def check_merge(call, plan, splits):
    rows = [b for b in range(call.batch) for _ in range(call.seqlen_q)]
    if call.cu_seqlens_q is not None:
        rows = torch.arange(call.batch).repeat_interleave(call.cu_seqlens_q.diff()).tolist()
        rows += [None] * (call.q.shape[2] - len(rows))
    merged = run(_merged, len(rows), call, plan, 1)
    assert [x for (x,) in merged] == [splits.get(b, 0) for b in rows]


@st.composite
def batches(draw):
    """Sequences of lengths from nothing to far more than a share, as a batch of one capacity or packed."""
    sizes = {"num_heads": (kv := draw(st.integers(1, 2))) * draw(st.integers(1, 5)), "num_kv_heads": kv, "head_dim": 1}
    band = draw(st.sampled_from([{}, {"window_left": 300}, {"window_left": 700, "window_right": 9}]))
    terms = {**sizes, "window_right": 0, **band, "batch_invariant": draw(st.booleans())}
    keys = draw(st.lists(st.sampled_from([0, 1, 255, 257, 900]) | st.integers(0, 5000), min_size=2, max_size=9))
    if draw(st.booleans()):
        offsets = torch.tensor(keys) - draw(st.integers(0, 50))
        rows = draw(st.integers(1, 9))
        return random_call(len(keys), seqlen_q=rows, seqlen_k=5000, q_offset=offsets, **terms)
    rows = draw(st.lists(st.sampled_from([0, 1, 1, 2, 30]), min_size=len(keys), max_size=len(keys)))
    mix = [(q, k, k - q) for q, k in zip(rows, keys, strict=True)]
    parts = [random_call(1, seqlen_q=q, seqlen_k=k, q_offset=offset, **terms) for q, k, offset in mix]
    return packed(parts, spare=draw(st.sampled_from([0, 7])))


@pytest.mark.parametrize("multiprocessors", [1, 7])
def test_programs_of_different_lengths(chip, multiprocessors):
    chip(multiprocessors)

    @settings(max_examples=4, deadline=None)
    @given(call=batches(), num_splits=st.integers(0, 5))
    def any_batch(call, num_splits):
        check_plan(call, num_splits)

    any_batch()


def test_long_sequences_get_the_programs(chip):
    """Of 5000, 100 and 1 keys the first gets nearly all of the shares, but none shorter than SPLIT_KEYS."""
    chip(7)
    offsets = torch.tensor([4999, 99, 0])
    call = random_call(3, 2, 1, 1, 5000, 1, q_offset=offsets, window_right=0)
    plan = configs.choose_plan(call, CONFIG)
    found = [b for b, *_ in run(_programs, plan.programs, call, plan, 6)]
    assert [found.count(b) for b in range(3)] == [-(-5000 // configs.SPLIT_KEYS), 1, 1]


def test_the_most_programs(chip, monkeypatch):
    """Each of 3 sequences has one split more than whole shares: of the programs one has nothing to do."""
    chip(1)
    monkeypatch.setattr(configs, "SHARES_PER_SM", 6)
    call = random_call(3, 2, 1, 1, 2561, 1, q_offset=torch.tensor([2560, 0, 0]), window_right=0)
    check_plan(call)
    plan = configs.choose_plan(call, CONFIG)
    found = [b for b, *_ in run(_programs, plan.programs, call, plan, 6)]
    assert ([found.count(b) for b in range(3)], len(found)) == ([6, 1, 1], 9)
