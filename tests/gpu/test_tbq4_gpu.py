"""Attention over TBQ4 codes on a CUDA device, looked up in words or in bytes, against float64 (TRITON_INTERPRET=0)."""

import math

import pytest
import torch

from attnpatch import tbq4
from attnpatch.kernels.decode.launch import decode
from attnpatch.kernels.decode.unpack import has_whole_norms
from attnpatch.testing.inputs import codes, key_bounds, packed, paged, quantised
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
from tests.kernels.calls import poison

pytestmark = ON_GPU

KEYS = 1536
HALVES = [torch.bfloat16, torch.float16]
WIDTHS = [64, 128, 256]
ROWS = [1, 2, 4, 5, 16, 20, 64, 300]
"""Four heads each: up to 8 of a tile have products in int8, up to 16 in float16, more those of a warpgroup."""


def dense(**case):
    defaults = {"seqlen_q": 1, "seqlen_k": KEYS, "head_dim": 128, "q_offset": torch.tensor([1480, 700]), "lse": True}
    return call_on_gpu(**{**defaults, "window_right": 0, **case})


def unwritten(call):
    """``call`` with NaN behind the last key that a row of each sequence sees."""
    last = call.q_offset[:, None] + call.seqlen_q - 1
    return poison(call, torch.arange(call.seqlen_k, device=CUDA) > last)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("q_dtype", [*HALVES, torch.float32], ids=str)
def test_rows(q_dtype, head_dim, rows):
    """Norms in planes whose length is a multiple of 16 load asynchronously, others do not."""
    for keys in (KEYS, 1500):
        call = codes(unwritten(dense(seqlen_q=rows, seqlen_k=keys, head_dim=head_dim, dtype=q_dtype)))
        assert has_whole_norms(call) == (keys == KEYS)
        check(call)


@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9, 16, 32])
def test_groups(group, head_dim):
    for rows in (1, 5):
        check(codes(dense(seqlen_q=rows, num_heads=2 * group, head_dim=head_dim)))


@pytest.mark.parametrize("q_dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(8, 8), (16, 16), (32, 32), (40, 24), (80, 80), (96, 96), (128, 64), (64, 128), (192, 128), (128, 256), (64, 40)],
    ids=str,
)
def test_head_dims(head_dim, head_dim_v, q_dtype):
    """Words on both sides, on one or on none."""
    for rows in (1, 3, 20):
        check(codes(dense(seqlen_q=rows, head_dim=head_dim, head_dim_v=head_dim_v, dtype=q_dtype)))


SIDES = {  # of a call, and of it in 8 bits
    "K": lambda call, eight: codes(call, values=False),
    "V": lambda call, eight: codes(call, keys=False),
    "K, and V in 8 bits": lambda call, eight: codes(call)._replace(v=eight.v, v_scale=eight.v_scale),
    "V, and K in 8 bits": lambda call, eight: codes(call)._replace(k=eight.k, k_scale=eight.k_scale),
}


@pytest.mark.parametrize("rows", [1, 2, 4, 20])
@pytest.mark.parametrize("head_dim", [*WIDTHS, 80])
@pytest.mark.parametrize("side", SIDES.values(), ids=SIDES)
def test_one_of_both(side, head_dim, rows):
    for q_dtype in HALVES:
        call = unwritten(dense(seqlen_q=rows, head_dim=head_dim, dtype=q_dtype))
        for dtype, per in ((torch.int8, "token"), (torch.float8_e4m3fn, "head")):
            check(side(call, quantised(call, dtype, per)))


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("head_dim", WIDTHS)
def test_every_code_of_values(head_dim, rows):
    """One key: a query of zeros gets its value, of which rounding back gives every level."""
    x, levels = every_code(head_dim)
    call = zeros(x, rows)
    o = tbq4.rotate(decode(call).double())
    found = (o / tbq4.STEP / call.v_scale.double().repeat_interleave(head_dim // num_blocks(head_dim), dim=-1)).round()
    assert torch.equal(found, levels.double().expand_as(found))


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("head_dim", WIDTHS)
def test_every_code_of_keys(head_dim, rows):
    """One key: the lse of a query that picks one rotated channel is that channel, in float32."""
    x, levels = every_code(head_dim)
    call = zeros(x, rows, head_dim // rows, lse=True)
    picks = tbq4.rotation(head_dim, CUDA, torch.float32).to(call.q.dtype)
    size = picks.abs().amax(dim=1).double() / tbq4.rotation(head_dim, CUDA, torch.float64).abs().amax(dim=1)
    call = call._replace(q=picks.view(1, head_dim // rows, rows, head_dim).expand(len(x), -1, -1, -1))
    decode(call)
    norms = call.k_scale.double().repeat_interleave(head_dim // num_blocks(head_dim), dim=-1)
    found = call.lse.double().view(len(x), head_dim) / (size * norms[:, 0, 0] * tbq4.STEP)
    torch.testing.assert_close(found, levels.double()[:, 0, 0], rtol=1e-6, atol=1e-6)


def num_blocks(head_dim):
    return len(tbq4.blocks_of(head_dim))


def every_code(head_dim):
    """Codes ``[keys, 1, 1, head_dim // 2]`` that have every code at every channel, and their levels."""
    straight = (torch.arange(16)[:, None] + torch.arange(head_dim)) % 16
    x = torch.cat([straight, torch.randint(16, (112, head_dim), generator=torch.Generator().manual_seed(0))])
    x = x[:, None, None].to(CUDA)
    levels = torch.tensor(tbq4.LEVELS, device=CUDA)[x]
    return (x[..., ::2] | x[..., 1::2] << 4).to(torch.uint8), levels


def zeros(x, rows, num_heads=8, **terms):
    """Queries of zeros on a sequence per key, in float16."""
    head_dim = 2 * x.shape[3]
    sizes = {"batch": len(x), "num_heads": num_heads, "num_kv_heads": max(1, num_heads // 8), "seqlen_k": 1}
    call = call_on_gpu(**sizes, seqlen_q=rows, head_dim=head_dim, dtype=torch.float16, sm_scale=1.0, **terms)
    x = x.expand(-1, call.num_kv_heads, -1, -1)
    norms = torch.tensor([0.75, 1.5], device=CUDA).half()[: num_blocks(head_dim)].expand(*x.shape[:3], -1)
    return call._replace(q=torch.zeros_like(call.q), k=x, v=x, k_scale=norms, v_scale=norms)


TERMS = {
    "a window": {"window_left": 255},
    "a window of chance": {"window_left": 333, "window_right": 5},
    "rows that see nothing": {"q_offset": torch.tensor([-1, 1400])},
    "padding": {"key_padding": bool_mask(2, KEYS)},
    "bool mask": {"attn_mask": bool_mask(2, 1, 1, KEYS)},
    "bias": {"attn_mask": bias(1, 8, 1, KEYS)},
    "bounds": {"key_bounds": key_bounds(torch.tensor([33, 0]).view(2, 1, 1), torch.tensor([901, 0]).view(2, 1, 1))},
    "softcap, sinks, slopes": {"softcap": 3.0, "sinks": torch.zeros(8), "alibi_slopes": torch.linspace(0.01, 1, 8)},
    "no band": {"window_right": None, "q_offset": 0},
}


@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_terms(terms, head_dim):
    for rows, num_splits in ((1, 0), (1, 1), (4, 7), (20, 3)):
        check(codes(dense(seqlen_q=rows, head_dim=head_dim, **terms)), num_splits)


@pytest.mark.parametrize("rows", [1, 4, 20])
@pytest.mark.parametrize("head_dim", [128, 256, 80])
def test_holes_may_hold_nan(head_dim, rows):
    call = unwritten(dense(seqlen_q=rows, head_dim=head_dim, key_padding=bool_mask(2, KEYS)))
    call = codes(poison(call, ~call.key_padding))
    assert call.k_scale.isnan().any()
    assert call.v_scale.isnan().any()
    check(call)


@pytest.mark.parametrize("side", ["k_scale", "v_scale", "q"])
@pytest.mark.parametrize("rows", [1, 4, 20])
def test_nan_that_is_seen_is_not_hidden(rows, side):
    call = codes(dense(seqlen_q=rows, head_dim=256, lse=None))
    x = getattr(call, side).clone()
    x[0, :, 0, -1] = math.nan
    o = decode(call._replace(**{side: x}))
    assert o[0, :, 0].isnan().any(dim=-1).all()
    assert torch.equal(o[1], decode(call)[1])


@pytest.mark.parametrize("q_dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", [2e-5, 1e3])
def test_sizes(size, q_dtype):
    """Of K, balanced by q's, and of V."""
    root = size**0.5
    for rows in (1, 4, 20):
        call = dense(seqlen_q=rows, dtype=q_dtype)
        call = call._replace(q=call.q / root, k=call.k.float() * size, v=call.v.float() * size)
        check(codes(call._replace(sm_scale=call.sm_scale / root)))


def test_a_long_value_that_no_query_looks_at():
    """Probabilities times norms fit float16 beside one of 1e6 times the size, of weight 0."""
    for rows, kind in ((1, codes), (4, codes), (20, codes), (1, lambda call: quantised(call, torch.int8))):
        call = dense(batch=1, num_heads=1, num_kv_heads=1, seqlen_q=rows, q_offset=1480, dtype=torch.float16)
        k, v = call.k.clone(), call.v * 1e-3
        k[:, :, 700] = -8 * call.q[:, :, 0]
        v[:, :, 700] *= 1e6
        check(kind(call._replace(q=call.q[:, :, :1].expand(-1, -1, rows, -1).contiguous(), k=k, v=v)))


@pytest.mark.parametrize("rows", [1, 2])
def test_tiles_whose_weights_are_next_to_nothing(rows):
    """Scores of all keys but the last few lie 85 to 105 below: p is 1e-37, subnormal or 0, and so is its unit."""
    call = dense(batch=1, num_heads=4, num_kv_heads=1, seqlen_q=rows, q_offset=KEYS - rows, dtype=torch.float16)
    q = call.q[:, :1, :1].float()
    below = torch.linspace(85, 105, KEYS, device=CUDA).masked_fill(torch.arange(KEYS, device=CUDA) >= KEYS - 40, 0.0)
    k = -below[:, None] / call.sm_scale * q / (q * q).sum()
    check(codes(call._replace(q=q.half().expand_as(call.q).contiguous(), k=k.half())))


LAYOUTS = {
    "heads outside": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "an odd base": lambda x: torch.cat([x, x], dim=3)[..., 1 : 1 + x.shape[3]],
    "rows of odd length": lambda x: torch.cat([x, x[..., :1]], dim=3)[..., : x.shape[3]],
    "rows apart": lambda x: torch.stack([x, x], dim=2)[:, :, 1],
    "expanded": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("name", ["k", "v", "k_scale", "v_scale"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout, name):
    for rows, head_dim in ((1, 128), (4, 256), (20, 128)):
        call = codes(unwritten(dense(seqlen_q=rows, head_dim=head_dim)))
        check(call._replace(**{name: layout(getattr(call, name))}))


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("head_dim", [128, 256, 80])
def test_pages(head_dim, page_size):
    for rows in (1, 4, 20):
        check(paged(codes(dense(seqlen_q=rows, head_dim=head_dim)), page_size))
    check(paged(codes(dense(head_dim=head_dim), values=False), page_size))


@pytest.mark.parametrize("head_dim", WIDTHS)
def test_packed(head_dim):
    mix = [(1, 1500), (200, 900), (0, 40), (1, 1), (70, 70)]
    parts = [dense(batch=1, seqlen_q=q, seqlen_k=k, q_offset=k - q, head_dim=head_dim) for q, k in mix]
    call = packed([codes(part) for part in parts], spare=5)
    check(call)
    check(paged(call, 16))


@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("rows", [1, 4, 20])
def test_repeats(rows, head_dim):
    check_repeats(codes(dense(seqlen_q=rows, head_dim=head_dim)))


@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_graph_replays_while_sequences_grow(rows, head_dim):
    """The rotated query of a replay is that replay's, and nothing of one left over from another."""
    call = codes(dense(seqlen_q=rows, head_dim=head_dim, lse=None))
    check_replays(call, "q", [torch.randn_like(call.q) for _ in range(3)])
    check_replays(call, "q_offset", ([0, 1400], [1480, 63], [-1, 64], [-1, -1]))


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("head_dim", WIDTHS)
def test_batch_invariant(head_dim, rows):
    offsets = torch.tensor([0, 5000, 1023, 1024, 2047, 9], device=CUDA)
    case = {"batch": 6, "seqlen_q": rows, "seqlen_k": 6000, "q_offset": offsets, "head_dim": head_dim}
    call = codes(dense(**case, batch_invariant=True))
    together = bits(call)
    for batch in ([0], [1], [5, 4, 3, 2, 1, 0], [1] * 30):
        fields = {name: getattr(call, name)[batch] for name in ("q", "k", "v", "k_scale", "v_scale", "q_offset")}
        assert torch.equal(bits(call._replace(**fields)), together[batch]), batch


def test_nothing_waits():
    check_no_wait(codes(dense()))


def far_apart(x, distance):
    """``x`` with ``distance`` elements between its heads, which are two."""
    room = torch.empty(distance + x[:, 0].numel(), dtype=x.dtype, device=CUDA)
    far = room.as_strided(x.shape, (0, distance, *x[0, 0].contiguous().stride()))
    return far.copy_(x)


def test_beyond_32_bits():
    """Heads of codes 2**32 bytes apart, so 2**31 words, and heads of norms 2**31."""
    for rows, head_dim in ((1, 128), (4, 128), (20, 128), (1, 80)):
        call = codes(dense(batch=1, seqlen_q=rows, q_offset=1480, head_dim=head_dim, lse=None))
        fields = {name: far_apart(getattr(call, name), 2**32) for name in ("k", "v")}
        fields |= {name: far_apart(getattr(call, name), 2**31) for name in ("k_scale", "v_scale")}
        check(call._replace(**fields))
