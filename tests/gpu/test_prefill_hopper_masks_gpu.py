"""Masks that are tensors, on triton.prefill_hopper: its tiles, and those it leaves (run with TRITON_INTERPRET=0)."""

import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from attnpatch import masking, ops
from attnpatch.dispatch import choose, load_backend
from attnpatch.kernels.prefill_hopper import launch
from attnpatch.kernels.reference import hidden_keys
from attnpatch.testing.inputs import check_backend
from attnpatch.testing.samples import check_samples
from tests.gpu.calls import CUDA, ON_GPU, bool_mask, call_on_gpu

NAME = "triton.prefill_hopper"

pytestmark = [*ON_GPU, pytest.mark.usefixtures("hopper", "poison")]

N = 700
ROW = torch.arange(N)
CAUSAL = ROW[:, None] >= ROW
PADDED = torch.tensor([0, 133]).view(2, 1, 1, 1)
HOLES = bool_mask(N, N)
IN_SOME = HOLES | ~((ROW[:, None] >= 128) & (ROW[:, None] < 300))
"""Holes in the rows of two tiles."""

MASKS = {
    "causal": CAUSAL,
    "causal, padding on the left": CAUSAL & (ROW >= PADDED),
    "causal, padding on the right": CAUSAL & (ROW < N - PADDED),
    "causal, holes in some tiles": CAUSAL & IN_SOME,
    "one hole": CAUSAL & ~((ROW == 5) & (ROW == 699)[:, None]),
    "holes": HOLES,
    "holes in one sequence": (CAUSAL & (HOLES | torch.tensor([True, False]).view(2, 1, 1, 1))),
    "one row for all": (ROW >= PADDED) & (ROW < 650),
    "documents": (ROW[:, None] // 130 == ROW // 130),
    "rows that see no key": CAUSAL & (ROW[:, None] % 3 > 0) & (ROW[:, None] > 200),
    "tiles that see no key, and holes": CAUSAL & IN_SOME & (ROW[:, None] > 200),
    "nothing": torch.zeros(1, N, dtype=torch.bool),
}

TERMS = {
    "sinks": {"sinks": torch.linspace(-2, 2, 8)},
    "slopes per sequence": {"alibi_slopes": torch.linspace(0.01, 0.5, 16).view(2, 8)},
    "all, capped": {"sinks": torch.zeros(8), "alibi_slopes": torch.linspace(0.01, 0.5, 8), "softcap": 5.0},
    "window": {"window_left": 150, "window_right": 0},
    "offsets on the device": {"window_left": 300, "window_right": 0, "q_offset": torch.tensor([0, -150])},
    "padding with holes": {"key_padding": bool_mask(2, N)},
    "padding on the right": {"key_padding": (N - PADDED[:, 0, 0] > ROW)},
}


@pytest.fixture
def poison():
    """NaN in outputs before they are written, wherever they are allocated."""
    allocate = Tensor.new_empty_strided

    def poisoned(self, *sizes, **options):
        return allocate(self, *sizes, **options).fill_(math.nan)

    with mock.patch.object(Tensor, "new_empty_strided", poisoned):
        yield


def masked(mask, **case):
    mask = mask.expand((1,) * (4 - mask.dim()) + mask.shape)
    return call_on_gpu(**{"attn_mask": mask, "seqlen_q": N, "head_dim": 128, **case, "lse": True})


def unseen_poisoned(call):
    """NaN in keys and values that no row of their sequence sees."""
    dead = hidden_keys(call).all(dim=2).all(dim=1)[:, None, :, None]
    return call._replace(k=call.k.masked_fill(dead, math.nan), v=call.v.masked_fill(dead, math.nan))


def check(call):
    check_backend(load_backend(NAME), unseen_poisoned(call))


def own_tiles(call):
    """Which tiles, ``[batch, heads or 1, tiles]``, the kernel computes itself."""
    call = launch.with_bounds(call)
    ranges = torch.empty(launch.ranges_shape(call, 128), dtype=torch.int32, device=CUDA)
    launch.ranges_launch(call, tuple(ranges.shape), 128)(call, ranges)
    return ranges[..., 0] != 0


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks(mask, head_dim):
    check(masked(mask, head_dim=head_dim))


@pytest.mark.parametrize("name", ["causal, padding on the left", "causal, holes in some tiles"])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_terms(terms, name):
    check(masked(MASKS[name], **terms))


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("name", ["all, capped", "offsets on the device", "padding with holes"])
def test_terms_at_other_widths(name, head_dim):
    check(masked(MASKS["causal, holes in some tiles"], head_dim=head_dim, **TERMS[name]))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(40, 40), (96, 96), (192, 128)], ids=str)
def test_widths(head_dim, head_dim_v):
    check(masked(MASKS["causal, holes in some tiles"], head_dim=head_dim, head_dim_v=head_dim_v))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_float16(head_dim):
    check(masked(MASKS["causal, holes in some tiles"], head_dim=head_dim, dtype=torch.float16))


@pytest.mark.parametrize("rows", [1, 63, 130, 300])
@pytest.mark.parametrize("name", ["causal, padding on the left", "causal, holes in some tiles"])
def test_fewer_rows_than_keys(rows, name):
    """The last rows of a mask: a view."""
    last = MASKS[name][..., N - rows :, :]
    check(masked(last, seqlen_q=rows, seqlen_k=N))
    check(masked(last, seqlen_q=rows, seqlen_k=N, window_left=200, window_right=0, q_offset=N - rows))


@pytest.mark.parametrize("heads", [(8, 8), (9, 3), (8, 1)], ids=str)
def test_groups(heads):
    check(masked(MASKS["causal, holes in some tiles"], num_heads=heads[0], num_kv_heads=heads[1]))


def test_masks_per_head():
    """With bounds of each head: of eight the odd ones have holes, all in other tiles."""
    tiles = torch.arange(N)[:, None] // 128
    holes = torch.stack([CAUSAL & (HOLES | (tiles != h // 2) | (h % 2 == 0)) for h in range(8)])[None].to(CUDA)
    call = masked(holes, key_bounds=ops.key_bounds(holes))
    own = own_tiles(call)
    assert own[:, ::2].all()
    assert (~own[:, 1::2]).sum(dim=2).eq(1).all()
    check(call)


def test_bounds_that_promise_nothing():
    """Rows that are not plain though the mask hides nothing between their bounds."""
    bounds = masking.key_bounds(CAUSAL[None, None]) * torch.tensor([1, 1, 0], dtype=torch.int32)
    check(masked(CAUSAL, key_bounds=bounds))


def test_which_tiles_it_computes():
    whole = [True] * 6
    assert own_tiles(masked(MASKS["causal, padding on the left"])).tolist() == [[whole]] * 2
    some = [True, False, False, True, True, True]
    assert own_tiles(masked(MASKS["causal, holes in some tiles"])).tolist() == [[some]] * 2
    assert own_tiles(masked(MASKS["holes in one sequence"])).tolist() == [[whole], [[False] * 6]]


def test_dispatch_takes_it():
    assert choose(masked(CAUSAL))[1].backend == NAME
    call = masked(CAUSAL)
    additive = torch.zeros(1, 1, N, N, device=CUDA).masked_fill(~call.attn_mask[:1, :1], -math.inf)
    assert choose(call._replace(attn_mask=additive.expand(2, 8, N, N)))[1].backend == "triton.prefill"


def large(kind):
    row, sequence = torch.arange(4096, device=CUDA), torch.arange(2, device=CUDA).view(-1, 1, 1, 1)
    mask = (row <= row[:, None]) & (row >= 1000 * sequence)
    hole = torch.rand(mask.shape, device=CUDA) < 0.01
    return mask & ~hole if kind == "holes" else mask & ~(hole & (row[:, None] // 512 % 2 == 1))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["holes", "holes in half of the tiles"])
def test_many_tiles_and_repeats(kind, head_dim):
    call = masked(large(kind), num_heads=32, num_kv_heads=8, seqlen_q=4096, head_dim=head_dim)
    run = load_backend(NAME).run
    first = run(call)
    check_samples(first, call)
    assert not first.isnan().any()
    assert all(torch.equal(run(call), first) for _ in range(5))


def test_a_graph_replays_with_another_mask():
    """Which kernel computes a tile is decided on the device, at each replay."""
    mask = MASKS["causal"].to(CUDA).expand(2, 1, N, N).contiguous()
    call = masked(mask)
    run = load_backend(NAME).run
    run(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(call)
    for name in ("causal, holes in some tiles", "causal, padding on the left", "nothing", "holes", "causal"):
        mask.copy_(MASKS[name])
        captured.fill_(math.nan)
        call.lse.fill_(math.nan)
        graph.replay()
        assert not captured.isnan().any()
        assert not call.lse.isnan().any()
        assert torch.equal(captured, run(call)), name
        check_samples(captured, call)


def test_where_rows_are_plain_no_mask_is_read():
    """A mask that breaks the promise shows that nobody looks."""
    call = masked(HOLES, key_bounds=masking.key_bounds(CAUSAL[None, None]))
    backend = load_backend(NAME)
    unread = backend._replace(run=lambda unmasked: backend.run(call._replace(lse=unmasked.lse)))
    check_backend(unread, call._replace(attn_mask=None))
