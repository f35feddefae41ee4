"""triton.append on a CUDA device: several rows per sequence, packed sequences, batch_invariant (TRITON_INTERPRET=0)."""

import math

import pytest
import torch

from attnpatch.kernels.decode.launch import decode
from attnpatch.testing.inputs import key_bounds, packed
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
ROWS = 12
ROW = torch.arange(ROWS)
CAUSAL = {"q_offset": KEYS - ROWS, "window_right": 0}


def append(**case):
    return call_on_gpu(**{"seqlen_q": ROWS, "seqlen_k": KEYS, "head_dim": 128, "lse": True, **case})


@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 16, 32])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16, 17, 31, 64])
def test_rows_and_groups(rows, group):
    terms = {"seqlen_q": rows, "q_offset": KEYS - rows, "window_right": 0}
    check(append(num_heads=2 * group, **terms))
    check(append(num_heads=group, num_kv_heads=1, batch=1, window_left=300, **terms), 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [
        (16, 16),
        (32, 32),
        (40, 40),
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (100, 60),
        (64, 128),
        (192, 128),
        (256, 256),
    ],
    ids=str,
)
def test_head_dims(head_dim, head_dim_v, dtype):
    for rows in (3, ROWS, 40):
        check(append(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, seqlen_q=rows, **CAUSAL))


BANDS = {
    "no band": {},
    "bottom-right": CAUSAL,
    "cache with room": {"q_offset": torch.tensor(700), "window_right": 0},
    "the first rows see nothing": {"q_offset": -3, "window_right": 0},
    "no row sees a key": {"q_offset": -ROWS, "window_right": 0},
    "the last rows see nothing": {"q_offset": KEYS + 95, "window_right": 0, "window_left": 100},
    "a window narrower than the rows": {"q_offset": 1000, "window_right": 0, "window_left": 2},
    "a window": {"q_offset": 1000, "window_right": 0, "window_left": 511},
    "both sides": {"q_offset": 700, "window_left": 300, "window_right": 77},
    "left side only": {"q_offset": 700, "window_left": 300},
    "one each": {"q_offset": torch.tensor([3, 1480], dtype=torch.int32), "window_right": 0},
    "one each, one empty": {"q_offset": torch.tensor([-30, 1000]), "window_right": 0},
    "one each, a window": {"q_offset": torch.tensor([1400, -2]), "window_right": 0, "window_left": 600},
}

MASKS = {
    "bool, per row": {"attn_mask": bool_mask(1, 1, ROWS, KEYS)},
    "bias, per head": {"attn_mask": bias(1, 8, ROWS, KEYS)},
    "bfloat16 bias": {"attn_mask": bias(2, 1, 1, KEYS).bfloat16()},
    "padding": {"key_padding": bool_mask(2, KEYS)},
    "bounds": {"key_bounds": key_bounds(ROW * 100, ROW * 100 + 300)},
    "bounds, rows that see nothing": {"key_bounds": key_bounds(ROW * 90, torch.where(ROW % 3 == 0, 0, 1300))},
    "bounds and a mask": {"key_bounds": key_bounds(ROW, 1400, 0), "attn_mask": bool_mask(2, 1, ROWS, KEYS)},
}

TERMS = {
    "sinks": {"sinks": torch.linspace(-2, 40, 8)},
    "slopes": {"alibi_slopes": torch.linspace(0.01, 0.5, 16).view(2, 8)},
    "softcap": {"softcap": 5.0},
    "large scores": {"sm_scale": 300.0},
    "all": {"sinks": torch.zeros(8), "alibi_slopes": torch.linspace(0.01, 0.5, 8), "softcap": 3.0},
}


@pytest.mark.parametrize("num_splits", [0, 1, 7])
@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_bands(band, num_splits):
    check(append(**band), num_splits)


@pytest.mark.parametrize("num_splits", [0, 1, 7])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_masks(masks, num_splits):
    check(append(**masks), num_splits)
    check(append(**masks, **BANDS["one each"]), num_splits)


@pytest.mark.parametrize("num_splits", [0, 1])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_terms(terms, num_splits):
    check(append(**terms, **BANDS["one each"]), num_splits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_term_at_once(head_dim, dtype):
    for masks in ("bias, per head", "padding", "bounds and a mask"):
        check(append(**MASKS[masks], **TERMS["all"], **BANDS["one each, a window"], head_dim=head_dim, dtype=dtype))


LAYOUTS = {
    "heads outside": lambda q, k, v: (q.contiguous(), k.contiguous(), v.contiguous()),
    "one buffer": lambda q, k, v: (q, *torch.cat([k, v], dim=3).split(128, dim=3)),
    "k transposed": lambda q, k, v: (q, k.transpose(2, 3).contiguous().transpose(2, 3), v),
    "an odd base": lambda q, k, v: (q, *(torch.cat([x, x], dim=3)[..., 1:129] for x in (k, v))),
    "every second channel": lambda q, k, v: (q, k, v.repeat_interleave(2, dim=3)[..., ::2]),
    "expanded": lambda q, k, v: (q, k[:, :1].expand_as(k), v[:1].expand_as(v)),
}


@pytest.mark.parametrize("rows", [1, 2, ROWS])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout, rows):
    call = append(seqlen_q=rows, **CAUSAL)
    q, k, v = layout(call.q, call.k, call.v)
    check(call._replace(q=q, k=k, v=v))


def test_fused_projection():
    """q, k, v are views of one ``[batch, rows, heads + 2 * num_kv_heads, head_dim]``."""
    fused = torch.randn(2, 64, 12, 128, device=CUDA, dtype=torch.bfloat16).transpose(1, 2)
    q, k, v = fused.split([8, 2, 2], dim=1)
    check(append(seqlen_k=64, q_offset=64 - ROWS, window_right=0)._replace(q=q[:, :, -ROWS:], k=k, v=v))


@pytest.mark.parametrize("rows", [1, ROWS, 64])
def test_poisoned_tail(rows):
    offsets = torch.tensor([700, 13], device=CUDA)
    call = append(seqlen_q=rows, q_offset=offsets, window_left=200, window_right=0)
    keys = torch.arange(KEYS, device=CUDA)
    dead = ((keys > offsets[:, None] + rows - 1) | (keys < offsets[:, None] - 200))[:, None, :, None]
    poisoned = call._replace(k=call.k.masked_fill(dead, math.nan), v=call.v.masked_fill(dead, math.nan))
    assert torch.equal(check(poisoned), decode(call))


def test_sequences_of_different_lengths():
    offsets = torch.tensor([0, 8000, -9, 5, 64, 63, 4000, 130, 1, 20000, 511, 512, 513])
    for rows in (1, 4, ROWS):
        call = append(batch=13, seqlen_q=rows, seqlen_k=20100, q_offset=offsets, window_right=0)
        check(call)
        check(call._replace(window_left=1023))


MIXES = {
    "steps": [(1, 700), (1, 3), (1, 1), (1, 64), (1, 4000)],
    "steps and a prompt": [(1, 700), (300, 300), (1, 9), (1, 2000)],
    "a chunk of a prompt": [(1, 700), (200, 1000), (1, 33)],
    "empty sequences": [(0, 50), (1, 700), (0, 0), (5, 5), (3, 0), (0, 1)],
    "one": [(7, 500)],
    "more rows than keys": [(40, 13), (1, 99)],
}


def mixed(mix, spare=0, **case):
    defaults = {"batch": 1, "head_dim": 128, "window_right": 0, "lse": True}
    parts = [{"seqlen_q": q, "seqlen_k": k, "q_offset": k - q} for q, k in mix]
    return packed([call_on_gpu(**{**defaults, **part, **case}, seed=i) for i, part in enumerate(parts)], spare)


@pytest.mark.parametrize("spare", [0, 37])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_packed(mix, spare):
    check(mixed(mix, spare))
    check(mixed(mix, spare, window_left=100))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("heads", [(6, 6), (9, 3), (20, 1)], ids=str)
def test_packed_shapes(heads, head_dim, dtype):
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "dtype": dtype}
    for terms in ({}, {"softcap": 3.0, "sinks": torch.zeros(heads[0])}):
        check(mixed(MIXES["a chunk of a prompt"], **sizes, **terms))


def test_packed_alibi():
    for slopes in (torch.linspace(0, 1, 8), torch.linspace(0, 1, 8)[None]):
        check(mixed(MIXES["empty sequences"], alibi_slopes=slopes))


@pytest.mark.parametrize("rows", [1, 4, ROWS, 64])
def test_repeats(rows):
    check_repeats(append(seqlen_q=rows, **BANDS["one each"]))
    check_repeats(mixed(MIXES["steps and a prompt"]))


@pytest.mark.parametrize("rows", [1, 4, ROWS])
@pytest.mark.parametrize("window_left", [None, 500])
def test_a_graph_replays_with_other_offsets(rows, window_left):
    offsets = torch.tensor([100, 7], device=CUDA)
    call = append(seqlen_q=rows, seqlen_k=4096, q_offset=offsets, window_right=0, window_left=window_left)
    check_replays(call, "q_offset", ([100, 7], [4000, 0], [-1, 2047], [-99, -99], [4084, 4084]))
    call = call._replace(q_offset=torch.tensor(9, device=CUDA))
    check_replays(call, "q_offset", (9, 0, 4084, -1, 2000))


def test_a_graph_replays_with_other_cu_seqlens():
    """The sequences of a bucket: as many rows and keys at most, in other shares."""
    call = mixed([(1, 700), (100, 300), (1, 9), (1, 2000)])
    call = call._replace(q_offset=torch.zeros(4, dtype=torch.int64, device=CUDA), window_right=None)
    check_replays(
        call, "cu_seqlens_q", ([0, 1, 101, 102, 103], [0, 1, 2, 3, 4], [0, 0, 100, 100, 103], [0, 0, 0, 0, 0])
    )
    check_replays(call, "cu_seqlens_k", ([0, 9, 9, 3000, 3009], [0, 1, 2, 3, 4], [0, 0, 0, 0, 3009], [0, 0, 0, 0, 0]))


@pytest.mark.parametrize("rows", [1, 4, ROWS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_batch_invariant(rows, dtype):
    """The same bits whatever the neighbours, their number and the capacity of the cache."""
    offsets = torch.tensor([0, 8000, 150, 1023, 1024, 3000, 1025, 7, 2047], device=CUDA)
    sizes = {"batch": 9, "num_heads": 32, "num_kv_heads": 8, "seqlen_q": rows, "seqlen_k": 9000, "dtype": dtype}
    call = append(**sizes, q_offset=offsets, window_right=0, batch_invariant=True)
    together = bits(call)
    for batch in ([0], [1], [8], [3, 4], [1, 2, 3], [8, 7, 6, 5, 4, 3, 2, 1, 0], [1] * 40):
        for capacity in (9000, 8100):
            part = call._replace(q=call.q[batch], k=call.k[batch, :, :capacity], v=call.v[batch, :, :capacity])
            assert torch.equal(bits(part._replace(q_offset=offsets[batch])), together[batch]), (batch, capacity)
    check(call)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_batch_invariant_packed(rows):
    """Neither the other sequences nor padding rows change what is computed of one."""
    case = {"batch_invariant": True, "num_heads": 32, "num_kv_heads": 8}
    mix = [(rows, 5000), (300, 700), (1, 3), (rows, 1024), (1, 1025)]
    together, first = bits(mixed(mix, **case)), 0
    for i, (q, k) in enumerate(mix):
        part = call_on_gpu(
            batch=1, seqlen_q=q, seqlen_k=k, q_offset=k - q, head_dim=128, window_right=0, seed=i, **case
        )
        for others in ([], [part], [part] * 7):
            alone = bits(packed([part, *others], spare=5))
            assert torch.equal(alone[:, :, :q], together[:, :, first : first + q]), (i, len(others))
        first += q


@pytest.mark.parametrize("rows", [1, ROWS])
def test_nothing_waits_for_the_device(rows):
    check_no_wait(append(seqlen_q=rows, **BANDS["one each"]))
    check_no_wait(mixed(MIXES["steps and a prompt"]))


def test_lengths_do_not_recompile():
    """One kernel serves every length and batch up to the next power of two."""
    from attnpatch.kernels.decode.kernel import _split_kernel
    from attnpatch.kernels.decode.merge import _merge_kernel

    def compiled():
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in (_split_kernel, _merge_kernel)]

    def run(keys):
        call = append(seqlen_q=4, seqlen_k=keys, q_offset=torch.tensor([keys - 4, 3]), window_right=0, head_dim=72)
        decode(call)

    run(640)
    run(651)
    before = compiled()
    for keys in (33, 512, 1000, 1001, 4096):
        run(keys)
    assert sum(compiled()) <= sum(before) + 2  # how many splits a merge takes at a time is a power of two


def test_cache_of_more_than_2_to_the_31_elements():
    seqlen = 2**21 + 5000
    cache = torch.randn(2, 1, seqlen, 4, 256, dtype=torch.bfloat16, device=CUDA).transpose(2, 3)
    call = append(batch=1, num_heads=4, num_kv_heads=4, seqlen_k=1, head_dim=256, window_right=0)
    call = call._replace(k=cache[0], v=cache[1], q_offset=torch.tensor(seqlen - ROWS, device=CUDA))
    assert call.k.numel() > 2**31
    check_samples(decode(call), call)
