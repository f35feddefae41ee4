"""Attention over integers of 4 bits on a CUDA device, in words or in bytes, against float64 (TRITON_INTERPRET=0)."""

import pytest
import torch

from attnpatch.kernels.decode.launch import decode
from attnpatch.kernels.decode.unpack import has_whole_norms
from attnpatch.testing.inputs import codes, integers, packed, paged, quantised
from tests.gpu.calls import CUDA, ON_GPU, bool_mask, call_on_gpu, check, check_no_wait, check_repeats, check_replays
from tests.gpu.test_tbq4_gpu import HALVES, KEYS, TERMS, dense, every_code, unwritten
from tests.kernels.calls import poison

pytestmark = ON_GPU

GROUPS = [(64, 1), (64, 2), (128, 1), (128, 2), (128, 4), (256, 1), (256, 4), (96, 3), (80, 1)]


def planar(call):
    """Scales and shifts of a group side by side over the keys."""
    fields = ("k_scale", "v_scale", "k_shift", "v_shift")
    return call._replace(**{name: getattr(call, name).transpose(2, 3).contiguous().transpose(2, 3) for name in fields})


@pytest.mark.parametrize("rows", [1, 4, 5, 20, 64])
@pytest.mark.parametrize(("head_dim", "groups"), GROUPS)
@pytest.mark.parametrize("q_dtype", [*HALVES, torch.float32], ids=str)
def test_groups(q_dtype, head_dim, groups, rows):
    for keys, scales in ((KEYS, torch.float16), (1500, torch.float32)):
        call = unwritten(dense(seqlen_q=rows, seqlen_k=keys, head_dim=head_dim, dtype=q_dtype))
        call = integers(call, groups, groups, scales)
        check(call)
        check(planar(call))
        assert has_whole_norms(planar(call)) == (keys == KEYS)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize(
    ("head_dim", "groups", "head_dim_v", "groups_v"), [(128, 2, 64, 1), (64, 1, 128, 4), (96, 1, 80, 1)]
)
def test_sides_differ(head_dim, groups, head_dim_v, groups_v, rows):
    for dtype in HALVES:
        check(integers(dense(seqlen_q=rows, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype), groups, groups_v))


@pytest.mark.parametrize("rows", [1, 4, 20])
@pytest.mark.parametrize("other", ["dense", "int8", "TBQ4"])
def test_one_of_both(other, rows):
    for dtype in HALVES:
        call = dense(seqlen_q=rows, dtype=dtype)
        mine, theirs = (
            integers(call, 2, 2),
            {"dense": call, "int8": quantised(call, torch.int8), "TBQ4": codes(call)}[other],
        )
        check(mine._replace(v=theirs.v, v_scale=theirs.v_scale, v_shift=None))
        check(mine._replace(k=theirs.k, k_scale=theirs.k_scale, k_shift=None))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_integer(head_dim, dtype):
    """One key and scales of 1: the output of a query of zeros is each integer plus its shift, to the bit."""
    x, _ = every_code(head_dim)
    call = call_on_gpu(batch=len(x), seqlen_q=1, seqlen_k=1, head_dim=head_dim, dtype=dtype)
    x = x.expand(-1, 2, -1, -1)
    ones = torch.ones(*x.shape[:3], head_dim // 64, device=CUDA)
    shift = 16.0 * torch.arange(head_dim // 64, device=CUDA).expand_as(ones)
    fields = {"k": x, "v": x, "k_scale": ones, "v_scale": ones, "k_shift": shift, "v_shift": shift}
    call = call._replace(q=torch.zeros_like(call.q), **fields)
    found = torch.stack((x & 15, x >> 4), dim=-1).flatten(-2).double() + shift.double().repeat_interleave(64, dim=-1)
    assert torch.equal(decode(call).double(), found.repeat_interleave(4, dim=1))


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_terms(terms):
    for rows, num_splits in ((1, 0), (1, 1), (4, 7), (20, 3)):
        check(integers(dense(seqlen_q=rows, **terms), 2, 2, torch.float16), num_splits)


@pytest.mark.parametrize("rows", [1, 20])
def test_holes_may_hold_nan(rows):
    call = unwritten(dense(seqlen_q=rows, key_padding=bool_mask(2, KEYS)))
    call = integers(poison(call, ~call.key_padding), 2, 2)
    check(call)
    check(planar(call))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages(page_size):
    for rows in (1, 4, 20):
        check(paged(integers(unwritten(dense(seqlen_q=rows)), 2, 2, torch.float16), page_size))


def test_packed_sequences():
    cases = ((1, 900), (3, 3), (40, 200), (1, 17))
    calls = [
        call_on_gpu(batch=1, seqlen_q=m, seqlen_k=n, head_dim=128, q_offset=n - m, window_right=0) for m, n in cases
    ]
    check(packed([integers(call, 2, 2) for call in calls], spare=3))


def test_repeats_replays_and_does_not_wait():
    call = integers(dense(q_offset=torch.tensor([1000])), 2, 2, torch.float16)
    check_repeats(call)
    check_no_wait(call)
    check_replays(call, "q_offset", ([5], [700], [1500]))
