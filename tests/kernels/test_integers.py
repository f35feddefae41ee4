"""Attention over integers of 4 bits in the interpreter, where they are read byte by byte, against float64.

Words of them are unpacked by inline PTX: tests/gpu/test_integers_gpu.py.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch import ops
from attnpatch.dispatch import BACKEND_MODULES, choose, load_backend
from attnpatch.kernels.decode.integers import INTEGER_WORDS, INTEGERS
from attnpatch.kernels.decode.launch import decode
from attnpatch.kernels.decode.unpack import Form, form_of, has_whole_norms
from attnpatch.kernels.dense import integers as multiplied_out
from attnpatch.kernels.tiled.backend import BACKENDS as TILED
from attnpatch.testing.inputs import check_backend, codes, integers, packed, paged, quantised, random_call
from tests.kernels.calls import bool_mask, check, poison
from tests.kernels.test_tbq4 import KEYS, TERMS, dense

pytestmark = [  # numpy's, not a kernel's
    pytest.mark.filterwarnings("ignore:(overflow|divide by zero):RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]


@pytest.mark.parametrize(("dtype", "scales"), [(torch.float16, torch.float16), (torch.float32, torch.float32)], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "groups", "head_dim_v", "groups_v"),
    [
        (16, 1, 40, 1),
        (64, 2, 64, 1),
        (96, 3, 128, 4),
        (128, 1, 64, 4),
        (256, 4, 128, 2),
        (80, 2, 96, 2),
        (30, 3, 18, 3),
    ],
)
def test_groups(head_dim, groups, head_dim_v, groups_v, dtype, scales):
    call = dense(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
    check(integers(call, groups, groups_v, scales), 2)


@pytest.mark.parametrize("group_size", [1, 3, 20])
def test_query_heads(group_size):
    check(integers(dense(batch=1, num_heads=group_size, q_offset=66)))


@pytest.mark.parametrize("rows", [3, 65])
def test_rows(rows):
    check(integers(dense(batch=1, num_heads=1, seqlen_q=rows, q_offset=40, head_dim=64), 2, 2))


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_terms(terms):
    """One row, and two where rows differ."""
    check(integers(dense(**terms, head_dim=64), 2, 2), 2)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_every_integer_is_exact(num_splits):
    """One key: the output of a query of zeros is its value, whatever the integers, within float32."""
    call = random_call(4, 1, 1, 1, 1, head_dim=128)
    every = torch.arange(256, dtype=torch.uint8).view(4, 1, 1, 64)
    scale, shift = torch.rand(4, 1, 1, 2) * 3, torch.randn(4, 1, 1, 2) * 10
    fields = {"k": every, "v": every, "k_scale": scale, "v_scale": scale, "k_shift": shift, "v_shift": shift}
    call = call._replace(q=torch.zeros_like(call.q), **fields)
    expected = torch.stack((every & 15, every >> 4), dim=-1).double().view(4, 1, 1, 2, 64)
    expected = (expected * scale[..., None] + shift[..., None]).flatten(-2)
    assert torch.equal(multiplied_out(every, scale, shift, torch.float64), expected)
    assert ((decode(call, num_splits) - expected).abs().max() / expected.abs().max()) < 2e-7


@pytest.mark.parametrize("side", ["K", "V", "8 bit K", "8 bit V", "TBQ4 K", "TBQ4 V"])
def test_one_of_both(side):
    call = dense(head_dim=64)
    other = quantised(call, torch.int8) if side[0] == "8" else codes(call) if side[0] == "T" else call
    mine = integers(call, 2 if side[-1] == "K" or len(side) > 1 else None, 2 if side != "K" else None)
    if side == "8 bit K" or side == "TBQ4 K":
        mine = mine._replace(k=other.k, k_scale=other.k_scale, k_shift=None)
    elif len(side) > 1:
        mine = mine._replace(v=other.v, v_scale=other.v_scale, v_shift=None)
    check(mine, 2)


@pytest.mark.parametrize("form", ["dense", "page of 1", "pages of 16"])
def test_what_no_row_sees_may_hold_nan(form):
    """Scales and shifts of NaN."""
    call = dense(head_dim=64, key_padding=bool_mask(2, KEYS))
    call = integers(poison(call, ~call.key_padding | (torch.arange(KEYS) > call.q_offset[:, None])), 2, 1)
    assert call.k_scale.isnan().any()
    assert call.v_shift.isnan().any()
    check(call if form == "dense" else paged(call, int(form.split()[-1])), 2)


def test_nan_that_is_seen_comes_out():
    call = integers(dense(batch=1, q_offset=69, lse=None))
    call.v_shift[0, 0, 3] = math.nan
    assert decode(call).isnan().all()


def test_whole_tiles_of_scales():
    """Scales of a group side by side over the keys, as many as there is room for: no mask but in a last tile."""
    offset = torch.tensor([50, 17])
    for rows, window in ((1, None), (1, 20), (2, None)):
        call = dense(seqlen_q=rows, seqlen_k=64, head_dim=64, q_offset=offset, window_left=window)
        call = integers(call, 2, 2)
        planar = {
            name: getattr(call, name).transpose(2, 3).contiguous().transpose(2, 3)
            for name in ("k_scale", "v_scale", "k_shift", "v_shift")
        }
        assert has_whole_norms(call._replace(**planar))
        assert not has_whole_norms(call)
        check(call._replace(**planar), 3)


def test_packed_sequences():
    calls = [
        random_call(1, 4, 2, rows, keys, head_dim=64, q_offset=keys - rows, window_right=0, seed=keys)
        for rows, keys in ((1, 40), (3, 3), (2, 90))
    ]
    check(packed([integers(call, 2, 1) for call in calls], spare=2), 2)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_tiled(groups):
    """Groups of any size."""
    call = poison(dense(seqlen_q=3, head_dim=64), torch.arange(KEYS) > torch.tensor([[68], [19]]))
    check_backend(TILED["cpu.tiled"], integers(call, groups, groups))
    check_backend(TILED["cpu.tiled"], paged(integers(call, groups, groups), 16))


def test_what_is_read_in_words(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x = torch.zeros(1, 2, 64, 64, dtype=torch.uint8)
    for dtype, ptx in INTEGER_WORDS.items():
        for groups in (1, 2):
            form = form_of(x, dtype, 16, 16, torch.zeros(1, 2, 64, groups))
            assert (form.unpack, form.step, form.tiles, form.aligned) == (ptx, 4, groups, True)
    shifts = {groups: torch.zeros(1, 2, 64, groups) for groups in (1, 4, 8)}
    assert [form_of(x, torch.float16, 16, 16, shifts[n]).aligned for n in (4, 8)] == [True, False]
    one = shifts[1]
    two_each = torch.zeros(1, 2, 64, 64)
    assert form_of(x, torch.float16, 16, 16, two_each) == Form(INTEGERS.value, x.stride(), 2, 64)
    assert form_of(x, torch.float16, 1, 16, one) == Form(INTEGERS.value, x.stride(), 2, 1)
    assert form_of(x, torch.float32, 16, 16, one) == Form(INTEGERS.value, x.stride(), 2, 1)
    assert form_of(x[..., ::2], torch.float16, 16, 16, one).unpack == INTEGERS.value


def test_dispatch():
    triton_backends = [name for name in BACKEND_MODULES if name.startswith("triton.")]
    for rows, name in ((1, "decode"), (5, "append"), (KEYS, "append")):
        call = integers(dense(seqlen_q=rows, lse=None, head_dim=64), 2, 2)
        assert choose(call, triton_backends)[1].backend == f"triton.{name}"
    assert load_backend("triton.tbq4").refuses(call) == "neither K nor V is TBQ4 codes"
    assert "K is int4, and" in load_backend("cpu.sdpa").refuses(call)


@pytest.mark.parametrize(("head_dim", "groups"), [(64, 8), (30, 2)])
def test_groups_that_no_tile_holds_are_refused(head_dim, groups):
    refusal = load_backend("triton.decode").refuses(integers(dense(head_dim=head_dim), None, groups))
    said = f"v_scale is of {groups} groups of {head_dim // groups} channels, which are to be even and no more than 4"
    assert refusal.startswith(said)


WRONG = {
    "a shift of another dtype": ({"k_shift": torch.zeros(2, 1, KEYS, 1).half()}, "must share float32, float16 or"),
    "a shift of another shape": ({"v_shift": torch.zeros(2, 1, KEYS, 3)}, r"v_shift .* does not broadcast"),
    "groups that do not divide": ({"k_scale": torch.zeros(2, 1, KEYS, 3)}, "3 groups, which do not divide head_dim 16"),
    "no scale": ({"k_scale": None}, "k_scale is missing for k in torch.uint8"),
    "a shift of no integers": ({"k": torch.zeros(2, 1, KEYS, 16).half(), "k_scale": None}, "it belongs to uint8"),
}


@pytest.mark.parametrize(("fields", "sentence"), WRONG.values(), ids=WRONG)
def test_bad_input_is_named(fields, sentence):
    call = integers(dense(lse=None))._replace(**fields)
    scales = {name: getattr(call, name) for name in ("k_scale", "v_scale", "k_shift", "v_shift")}
    with pytest.raises(ValueError, match=sentence):
        ops.attention(call.q, call.k, call.v, call.sm_scale, **scales)


@st.composite
def steps(draw):
    """A call of any sizes, groups and layout of scales, and in how many splits."""
    batch, seqlen_q, seqlen_k = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 90))
    offset = torch.tensor(draw(st.lists(st.integers(-2, seqlen_k), min_size=batch, max_size=batch)))
    (width, groups), (width_v, groups_v) = (
        draw(st.sampled_from([(64, 2), (32, 1), (128, 4), (96, 3), (24, 1), (48, 3), (80, 2), (30, 3)]))
        for _ in range(2)
    )
    call = random_call(
        *(batch, 2, 1, seqlen_q, seqlen_k),
        head_dim=width,
        head_dim_v=width_v,
        dtype=draw(st.sampled_from([torch.float16, torch.float32])),
        q_offset=offset,
        window_left=draw(st.none() | st.integers(0, 50)),
        window_right=draw(st.none() | st.integers(0, 2)),
        softcap=draw(st.none() | st.just(5.0)),
        key_padding=draw(st.none() | st.just(bool_mask(batch, seqlen_k))),
        lse=draw(st.none() | st.just(True)),
        seed=draw(st.integers(0, 99)),
    )
    if call.key_padding is not None:
        call = poison(call, ~call.key_padding)
    call = integers(call, groups, groups_v, draw(st.sampled_from([torch.float16, torch.float32])))
    order = draw(st.permutations(range(4)))
    back = [order.index(dim) for dim in range(4)]
    laid = {n: getattr(call, n).permute(order).contiguous().permute(back) for n in ("k", "k_scale", "v_shift")}
    page_size = draw(st.none() | st.sampled_from([4, 32]))
    call = call._replace(**laid)
    return (call if page_size is None else paged(call, page_size)), draw(st.integers(1, 3))


@settings(max_examples=8, deadline=None)
@given(step=steps())
def test_any_step(step):
    check(*step)
