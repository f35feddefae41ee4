"""triton.paged on a CUDA device: keys in pages of a pool, against float64 (run with TRITON_INTERPRET=0)."""

import math

import pytest
import torch

from attnpatch.kernels.decode.launch import decode
from attnpatch.testing.inputs import packed, paged
from attnpatch.testing.samples import check_samples
from tests.gpu.calls import (
    CUDA,
    ON_GPU,
    bias,
    bits,
    bool_mask,
    call_on_gpu,
    check,
    check_no_wait,
    check_repeats,
    check_replays,
)

pytestmark = ON_GPU

KEYS = 1500
OFFSETS = torch.tensor([1480, 700])
PAGES = [1, 3, 16, 32, 64, 128, 256]


def dense(**case):
    defaults = {"seqlen_q": 1, "seqlen_k": KEYS, "head_dim": 128, "q_offset": OFFSETS, "window_right": 0, "lse": True}
    return call_on_gpu(**{**defaults, **case})


@pytest.mark.parametrize("rows", [1, 2, 4, 16, 64, 300])
@pytest.mark.parametrize("page_size", PAGES)
def test_pages(page_size, rows):
    """Unused pages and those of hidden keys hold NaN, or have ids of no page."""
    check(paged(dense(seqlen_q=rows, q_offset=OFFSETS - rows), page_size))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 16, 32])
def test_groups(group, page_size):
    for rows in (1, 5):
        check(paged(dense(seqlen_q=rows, num_heads=2 * group), page_size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(16, 16), (32, 32), (40, 40), (64, 64), (80, 80), (96, 96), (100, 60), (128, 128), (192, 128), (256, 256)],
    ids=str,
)
def test_head_dims(head_dim, head_dim_v, dtype):
    """Of float32 fewer keys: rounded products of 1500 alone may be off by what is allowed in all."""
    keys = 300 if dtype == torch.float32 else KEYS
    for rows in (1, 20):
        sizes = {"seqlen_q": rows, "seqlen_k": keys, "head_dim": head_dim, "head_dim_v": head_dim_v}
        check(paged(dense(**sizes, q_offset=OFFSETS * keys // KEYS, dtype=dtype), 16))


TERMS = {
    "no band": {"window_right": None, "q_offset": 0},
    "one offset": {"q_offset": torch.tensor(900)},
    "a window": {"window_left": 255},
    "rows that see nothing": {"q_offset": torch.tensor([-1, 1400])},
    "padding": {"key_padding": bool_mask(2, KEYS)},
    "bool mask": {"attn_mask": bool_mask(2, 1, 1, KEYS)},
    "bias": {"attn_mask": bias(1, 8, 1, KEYS)},
    "sinks and slopes": {"sinks": torch.zeros(8), "alibi_slopes": torch.linspace(0.01, 1, 8)},
    "softcap": {"softcap": 3.0},
}


@pytest.mark.parametrize("num_splits", [0, 1, 7])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_terms(terms, num_splits):
    for rows in (1, 6):
        check(paged(dense(seqlen_q=rows, **terms), 16), num_splits)


def layouts(call):
    """The pools of ``call`` as servers lay them out."""
    k, v = call.k, call.v
    both = torch.stack([k, v], dim=1)  # pages of K and V in turn
    by_token = torch.stack([k, v]).transpose(2, 3).contiguous().transpose(2, 3)  # [pages, page_size, heads, head_dim]
    yield call._replace(k=both[:, 0], v=both[:, 1])
    yield call._replace(k=by_token[0], v=by_token[1])
    yield call._replace(k=k.transpose(2, 3).contiguous().transpose(2, 3))
    yield call._replace(k=torch.cat([k, k], dim=3)[..., 1 : 1 + k.shape[3]])
    yield call._replace(block_table=call.block_table.long())
    yield call._replace(block_table=call.block_table.t().contiguous().t())
    yield call._replace(block_table=call.block_table.repeat_interleave(2, dim=1)[:, ::2])


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_layouts(page_size):
    for rows in (1, 5):
        for call in layouts(paged(dense(seqlen_q=rows), page_size)):
            check(call)


def test_shared_pages():
    """Both sequences read the same pages, one of them twice."""
    call = paged(dense(), 16)
    table = call.block_table[:1].expand(2, -1).clone()
    table[:, 3] = table[:, 5]
    check(call._replace(block_table=table))
    check(call._replace(block_table=call.block_table[:1].expand(2, -1)))


@pytest.mark.parametrize("page_size", PAGES)
def test_packed(page_size):
    """Steps, a chunk of a prompt, an empty sequence and a whole prompt, and rows of no sequence."""
    mix = [(1, 1500), (200, 900), (0, 40), (1, 1), (1, 256), (70, 70)]
    for terms in ({}, {"window_left": 99}):
        parts = [dense(batch=1, seqlen_q=q, seqlen_k=k, q_offset=k - q, **terms) for q, k in mix]
        check(paged(packed(parts, spare=9), page_size))


def test_repeats():
    check_repeats(paged(dense(), 16))
    check_repeats(paged(dense(seqlen_q=16), 16))


@pytest.mark.parametrize("rows", [1, 5])
def test_a_graph_replays_while_sequences_grow(rows):
    call = paged(dense(seqlen_q=rows, seqlen_k=1504, window_right=None), 16)  # every key has a page
    call = call._replace(q_offset=OFFSETS.to(CUDA), window_right=0)
    check_replays(call, "q_offset", ([0, 1400], [15, 16], [1480, 1479], [-1, 17], [-50, -50]))
    shuffled = [call.block_table.flatten()[torch.randperm(188, device=CUDA)].view(2, 94) for _ in range(3)]
    check_replays(call, "block_table", shuffled)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("page_size", [1, 16])
def test_batch_invariant(page_size, rows):
    """The same bits whatever the neighbours, the pages and how many a table has room for."""
    offsets = torch.tensor([0, 5000, 1023, 1024, 2047, 9], device=CUDA)
    call = dense(batch=6, seqlen_q=rows, seqlen_k=6000, q_offset=offsets, batch_invariant=True)
    call = paged(call, page_size)
    together = bits(call)
    for batch in ([0], [1], [5, 4, 3, 2, 1, 0], [1, 2], [1] * 30):
        for room in (6000, 5120):
            table = call.block_table[batch, : -(-room // page_size)]
            part = call._replace(q=call.q[batch], q_offset=offsets[batch], block_table=table)
            assert torch.equal(bits(part), together[batch]), (batch, room)


def test_pool_of_more_than_2_to_the_31_elements():
    """Both where a page lies and a row within it are beyond 32 bits."""
    for page_size, num_pages in ((16, 2**19 + 100), (2**24 + 64, 2)):
        rows = min(page_size, 64)
        pool = torch.zeros(num_pages, 2, page_size, 128, dtype=torch.bfloat16, device=CUDA)
        assert pool.numel() > 2**31
        table = torch.tensor([[0, num_pages - 1], [num_pages - 1, num_pages - 2]], device=CUDA, dtype=torch.int32)
        ends = torch.randn(2, 2, rows, 128, device=CUDA).bfloat16()
        pool[table[:, 1].long(), :, -rows:] = ends
        call = dense(seqlen_k=1, q_offset=2 * page_size - 1, window_left=rows - 1)
        call = call._replace(k=pool, v=pool, block_table=table)
        check_samples(decode(call), call._replace(k=ends, v=ends, block_table=None, q_offset=rows - 1))


def test_nothing_waits_for_the_device():
    check_no_wait(paged(dense(), 16))


def test_tables_do_not_recompile():
    from attnpatch.kernels.decode.kernel import _split_kernel

    def compiled():
        return len(_split_kernel.device_caches[torch.cuda.current_device()][0])

    for keys in (16, 17, 640, 1000, 4096):  # one split, and several; padding; strides of 1, and multiples of 16
        decode(paged(dense(seqlen_k=keys, head_dim=72), 16))
    before = compiled()
    for keys in (18, 100, 656, 1001, 2048, 8192):
        decode(paged(dense(seqlen_k=keys, head_dim=72), 16))
    assert compiled() == before


def test_poison_beside_the_last_key():
    """The rest of a sequence's last page is NaN: it is read with the page, and must not count."""
    call = dense()
    dead = (torch.arange(KEYS, device=CUDA) > OFFSETS.to(CUDA)[:, None])[:, None, :, None]
    call = call._replace(k=call.k.masked_fill(dead, math.nan), v=call.v.masked_fill(dead, math.nan))
    for page_size in PAGES:
        check(paged(call, page_size))
