"""Attention over TBQ4 codes in the interpreter, where they are looked up byte by byte, against float64.

Words of codes are looked up by inline PTX: tests/gpu/test_tbq4_gpu.py.
"""

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch import ops, tbq4
from attnpatch.dispatch import BACKEND_MODULES, choose, load_backend
from attnpatch.kernels.common import hadamard
from attnpatch.kernels.decode.codes import BYTES, INT8_ROWS, INT8_WORDS, WORDS
from attnpatch.kernels.decode.int8 import keys_as_loaded, keys_for_products
from attnpatch.kernels.decode.launch import decode
from attnpatch.kernels.decode.unpack import Form, form_of, forms_of, has_whole_norms
from attnpatch.testing.inputs import codes, key_bounds, packed, paged, quantised, random_call
from tests.kernels.calls import bias, bool_mask, check, poison

pytestmark = [  # numpy's, not a kernel's
    pytest.mark.filterwarnings("ignore:(overflow|divide by zero):RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

KEYS = 70


def dense(**case):
    sizes = {"batch": 2, "num_heads": 2, "num_kv_heads": 1, "seqlen_q": 1, "seqlen_k": KEYS, "head_dim": 16}
    terms = {"q_offset": torch.tensor([66, 17]), "window_right": 0, "lse": True, "dtype": torch.float16}
    return random_call(**{**sizes, **terms, **case})


@pytest.mark.parametrize("group", [1, 3, 5, 16, 20])
def test_groups(group):
    check(codes(dense(batch=1, num_heads=group, q_offset=66)))


@pytest.mark.parametrize("rows", [3, 65])
def test_rows(rows):
    """triton.append takes more than 64 here: no other kernel of Triton reads codes."""
    check(codes(dense(batch=1, num_heads=1, seqlen_q=rows, q_offset=40)))


HEAD_DIMS = {
    torch.float16: [(8, 8), (40, 24), (64, 64), (96, 96), (192, 128), (256, 256)],
    torch.float32: [(8, 40), (16, 64), (80, 80), (128, 40), (64, 192)],
}


@pytest.mark.parametrize(("dtype", "widths"), [(t, n) for t, pairs in HEAD_DIMS.items() for n in pairs], ids=str)
def test_head_dims(widths, dtype):
    """One block, several of one size, several of different sizes; zeros between the last and a tile's end."""
    check(codes(dense(batch=1, q_offset=66, head_dim=widths[0], head_dim_v=widths[1], dtype=dtype)))


@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_splits(num_splits):
    """The last of seven has no key of the short sequence."""
    check(codes(dense(seqlen_k=200, q_offset=torch.tensor([190, 17]))), num_splits)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_levels_are_exact(num_splits):
    """One key: the output of a query of zeros is its decoded value, whatever the codes, within float32."""
    call = dense(batch=1, num_heads=1, seqlen_k=1, q_offset=0, head_dim=128, lse=None, dtype=torch.float32)
    call = codes(call._replace(q=torch.zeros_like(call.q)))
    every = torch.arange(256, dtype=torch.uint8).view(4, 1, 1, 64)
    norms = torch.tensor([1.0, 0.37, 6e-8, 65504.0]).half().view(4, 1, 1, 1)
    call = call._replace(q=call.q.expand(4, -1, -1, -1), k=every, v=every, k_scale=norms, v_scale=norms)
    expected = tbq4.decode(every, norms, 128, torch.float64)
    error = (decode(call, num_splits) - expected).abs() / torch.linalg.vector_norm(expected, dim=-1, keepdim=True)
    assert error.max() < 2e-7


TERMS = {
    "a window": {"window_left": 40, "seqlen_q": 2},
    "a window of chance": {"window_left": 13, "window_right": 5},
    "rows that see nothing": {"q_offset": torch.tensor([-1, 68]), "seqlen_q": 2},
    "padding": {"key_padding": bool_mask(2, KEYS)},
    "bool mask": {"attn_mask": bool_mask(2, 1, 1, KEYS)},
    "bias": {"attn_mask": bias(1, 2, 2, KEYS, hide=0.2), "seqlen_q": 2},
    "bounds": {"key_bounds": key_bounds(torch.tensor([3, 70]).view(2, 1, 1), torch.tensor([50, 70]).view(2, 1, 1))},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0])},
    "slopes": {"alibi_slopes": torch.tensor([0.01, 0.5]), "seqlen_q": 2},
    "no band": {"window_right": None, "q_offset": 0},
}


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_terms(terms):
    """One row, and two where rows differ."""
    check(codes(dense(**terms)), 2)


def one_side(side, call, dtype=torch.int8, per="token"):
    """``call`` with one side in codes, and the other one as it is or in 8 bits."""
    if side in ("K", "V"):
        return codes(call, keys=side == "K", values=side == "V")
    packed_call, other = codes(call), quantised(call, dtype, per)
    if side == "K in codes, V in 8 bits":
        return packed_call._replace(v=other.v, v_scale=other.v_scale)
    return packed_call._replace(k=other.k, k_scale=other.k_scale)


@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("side", ["K", "V", "K in codes, V in 8 bits", "V in codes, K in 8 bits"])
def test_one_of_both(side, head_dim):
    """A tile of several blocks has its norms on the elements; one block, on scores and probabilities."""
    call = dense(head_dim=head_dim)
    for per in ("token", "head") if "8" in side else ("",):
        check(one_side(side, call, torch.int8, per), 2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_beside_float8(dtype):
    for side in ("K in codes, V in 8 bits", "V in codes, K in 8 bits"):
        check(one_side(side, dense(dtype=torch.float32), dtype))


@pytest.mark.parametrize(
    ("head_dim", "form"), [(16, "dense"), (80, "dense"), (80, "page of 1"), (16, "pages of 16")], ids=str
)
def test_what_no_row_sees_may_hold_nan(head_dim, form):
    """Behind the last key, in the hole of a padding, before a window: norms are NaN."""
    call = dense(head_dim=head_dim, window_left=50, key_padding=bool_mask(2, KEYS))
    dead = torch.arange(KEYS) > call.q_offset[:, None]
    dead |= torch.arange(KEYS) < call.q_offset[:, None] - 50
    call = codes(poison(call, dead | ~call.key_padding))
    assert call.k_scale.isnan().any()
    assert call.v_scale.isnan().any()
    check(call if form == "dense" else paged(call, 16 if "16" in form else 1), 2)


@pytest.mark.parametrize("side", ["k_scale", "v_scale"])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_nan_that_is_seen_is_not_hidden(head_dim, side):
    call = codes(dense(head_dim=head_dim, lse=None))
    norms = getattr(call, side).clone()
    norms[0, :, 60, -1] = math.nan
    o = decode(call._replace(**{side: norms}), 2)
    assert o[0].isnan().any(dim=-1).all()
    assert torch.equal(o[1], decode(call, 2)[1])


@pytest.mark.parametrize(("size", "num_splits"), [(2.5e-5, 1), (2.5e3, 1), (2.5e3, 2)])
def test_sizes(size, num_splits):
    """Vectors of lengths 1e-4 and 1e4: a probability times a norm fits float16 in units of the largest norm."""
    call = dense(q_offset=torch.tensor([69, 3]))
    root = size**0.5
    call = call._replace(q=call.q / root, k=call.k.float() * size, v=call.v.float() * size, sm_scale=0.25 / root)
    check(codes(call), num_splits)


def test_sizes_side_by_side():
    """Values of lengths from 0.04 to 400, the longest among the first, in the middle and last."""
    for where in (0, 35, 66):
        call = dense(batch=1, q_offset=66)
        factors = torch.full((KEYS, 1), 0.01)
        factors[where] = 100.0
        check(codes(call._replace(v=call.v * factors)), 2)


@pytest.mark.parametrize("head_dim", [16, 40])
def test_a_long_value_that_no_query_looks_at(head_dim):
    """Probabilities times norms fit float16 beside one of 1e6 times the size, of weight 0."""
    call = dense(batch=1, num_heads=1, q_offset=66, head_dim=head_dim)
    k, v = call.k.clone(), call.v * 1e-3
    k[:, :, 40] = -8 * call.q[:, :, 0]
    v[:, :, 40] *= 1e6
    check(codes(call._replace(k=k, v=v)))


def test_zeros():
    """A row of zeros has norm 0, and a query of zeros the mean of the values."""
    call = dense(batch=1, q_offset=66)
    zero = torch.zeros_like(call.q)
    check(codes(call._replace(q=zero)))
    check(codes(call._replace(k=torch.zeros_like(call.k), v=torch.zeros_like(call.v))))


def test_norms_count():
    call = codes(dense(batch=1, q_offset=66, dtype=torch.float32, lse=None))
    o = decode(call)
    torch.testing.assert_close(decode(call._replace(v_scale=call.v_scale * 2)), o * 2, rtol=1e-6, atol=1e-6)
    sharper = decode(call._replace(k_scale=call.k_scale * 2))
    torch.testing.assert_close(sharper, decode(call._replace(sm_scale=call.sm_scale * 2)), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(sharper, o, atol=1e-2)
    assert not torch.allclose(decode(call._replace(v=call.v ^ 1)), o, atol=1e-3), "a lower nibble counts"
    assert not torch.allclose(decode(call._replace(k=call.k ^ 128)), o, atol=1e-3), "an upper nibble counts"


@pytest.mark.parametrize(
    ("page_size", "head_dim", "keys"), [(1, 16, True), (1, 40, False), (16, 16, False), (16, 40, True)]
)
def test_pages(page_size, head_dim, keys):
    check(paged(codes(dense(head_dim=head_dim), keys=keys), page_size), 2)


def test_packed():
    mix = [(1, 70), (3, 9), (0, 3), (2, 66)]
    parts = [dense(batch=1, seqlen_q=q, seqlen_k=k, q_offset=k - q) for q, k in mix]
    call = packed([codes(part) for part in parts], spare=3)
    check(call)
    check(paged(call, 16))


LAYOUTS = {
    "heads outside": (16, lambda x: x.contiguous()),
    "transposed": (40, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
    "an odd base": (16, lambda x: torch.cat([x, x], dim=3)[..., 1 : 1 + x.shape[3]]),
    "an odd base, two blocks": (40, lambda x: torch.cat([x, x], dim=3)[..., 1 : 1 + x.shape[3]]),
    "rows apart": (40, lambda x: torch.stack([x, x], dim=2)[:, :, 0]),
    "one head for all": (16, lambda x: x[:, :1].expand_as(x)),
}


@pytest.mark.parametrize(("head_dim", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout, head_dim):
    """Of codes and of norms, each by itself."""
    call = codes(dense(batch=1, q_offset=66, num_kv_heads=2, head_dim=head_dim))
    check(call._replace(k=layout(call.k), v_scale=layout(call.v_scale)))
    check(call._replace(v=layout(call.v), k_scale=layout(call.k_scale)))


def test_the_result_does_not_depend_on_the_layout_of_norms():
    call = codes(dense(head_dim=40, lse=None))
    inner = call._replace(k_scale=call.k_scale.contiguous(), v_scale=call.v_scale.contiguous())
    assert inner.k_scale.stride() != call.k_scale.stride()
    assert torch.equal(decode(inner), decode(call))


def test_which_norms_are_whole():
    """Planes of a capacity in sixteens, dense and of one sequence to a row."""
    call = codes(dense(seqlen_k=64, q_offset=9))
    assert has_whole_norms(call)
    assert has_whole_norms(codes(dense(seqlen_k=64, q_offset=9), values=False))
    contiguous = call.k_scale.repeat(1, 1, 1, 2)[..., :1]
    assert not has_whole_norms(call._replace(k_scale=contiguous))
    assert not has_whole_norms(codes(dense()))
    assert not has_whole_norms(paged(call, 16))
    assert not has_whole_norms(quantised(dense(seqlen_k=64), torch.int8))
    assert not has_whole_norms(dense(seqlen_k=64))


def test_whole_norms_of_a_split_that_ends_between():
    """Of sixteen norms read, those behind the last key are NaN, and not used; a band's first key may be odd."""
    for terms in ({}, {"window_left": 21}, {"window_right": None, "q_offset": 0}):
        call = dense(seqlen_k=64, q_offset=torch.tensor([50, 17]))._replace(**terms)
        if call.window_right is not None:
            call = poison(call, torch.arange(64) > call.q_offset[:, None])
        call = codes(call)
        assert has_whole_norms(call)
        check(call, 3)


def test_batch_invariant(chip):
    chip(132)
    offsets = torch.tensor([9, 1100])
    case = {"batch": 2, "num_heads": 1, "seqlen_k": 1200, "q_offset": offsets, "lse": None, "batch_invariant": True}
    call = codes(dense(seqlen_q=2, **case))
    together = check(call)
    for batch in ([1], [0], [1, 0, 1]):
        fields = {name: getattr(call, name)[batch] for name in ("q", "k", "v", "k_scale", "v_scale", "q_offset")}
        assert torch.equal(decode(call._replace(**fields)), together[batch]), batch


def test_what_is_looked_up_in_words(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x = torch.zeros(1, 2, 64, 128, dtype=torch.uint8)
    few, many = INT8_ROWS, INT8_ROWS + 1
    for width, rows, name, tiles in (
        (32, 4, INT8_WORDS, 1),
        (64, few, INT8_WORDS, 1),
        (64, many, WORDS, 1),
        (128, few, INT8_WORDS, 2),
        (128, many, WORDS, 2),
    ):
        form = form_of(x[..., :width], torch.bfloat16, 16, rows)
        assert (form.unpack, form.step, form.tiles, form.aligned) == (name.value, 4, tiles, True)
        assert [getattr(n, "value", n) for n in form.strides] == [x.stride(0) // 2, x.stride(1) // 2, 64, 1]
    for odd in (x[..., :48], x[..., :63], x.transpose(2, 3), x[..., ::2]):
        assert form_of(odd, torch.float16, 16, many) == Form(BYTES.value, odd.stride(), 2)
    whole = x[..., :64]
    assert form_of(whole, torch.float16, 1, few).unpack == BYTES.value
    assert form_of(whole, torch.float32, 16, few).unpack == BYTES.value


def test_rows_of_words_are_aligned_where_the_address_and_the_strides_are(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    rows_of_72 = torch.zeros(1, 2, 64, 72, dtype=torch.uint8)[..., :64]
    forms = [
        form_of(torch.zeros(1, 2, 64, 64, dtype=torch.uint8), torch.float16, 2, 8),
        form_of(rows_of_72, torch.float16, 16, 8),
    ]
    assert [(form.unpack, form.aligned) for form in forms] == [(INT8_WORDS.value, False)] * 2


def test_codes_are_in_words_on_both_sides_or_on_none(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    k, v = (torch.zeros(1, 1, 64, width, dtype=torch.uint8) for width in (96, 64))
    call = dense(batch=1, head_dim=192, head_dim_v=128)._replace(k=k, v=v)
    assert [form.unpack for form in forms_of(call, 16, 8)] == [BYTES.value] * 2
    assert [form.unpack for form in forms_of(call._replace(k=v), 16, 8)] == [INT8_WORDS.value] * 2


@triton.jit
def _relabelled(x, rows, back, N: tl.constexpr):
    keys, cols = tl.arange(0, N), tl.arange(0, 2)
    places = 2 * keys[:, None] + cols[None, :]
    moved = keys_for_products(tl.load(x + places))
    tl.store(rows + places, moved)
    tl.store(back + places, keys_as_loaded(moved.T).T)


@pytest.mark.parametrize("n", [32, 64, 128])
def test_keys_are_relabelled_for_products(n):
    """Eight rows of a tile of products apart are four neighbouring keys, and scores lie as the keys do."""
    x = torch.arange(2 * n, dtype=torch.float32).view(n, 2)
    rows, back = torch.full_like(x, math.nan), torch.full_like(x, math.nan)
    _relabelled[(1,)](x, rows, back, n)
    a, r, g = (torch.arange(n) // 32, torch.arange(n) % 32 // 8, torch.arange(n) % 8)
    assert torch.equal(rows, x[32 * a + 4 * g + r])
    assert torch.equal(back, x)


def test_codes_are_looked_up_in_bytes_on_the_cpu():
    x = torch.zeros(1, 2, 64, 64, dtype=torch.uint8)
    for rows in (INT8_ROWS, 16, 64):
        assert form_of(x, torch.float16, 16, rows) == Form(BYTES.value, x.stride(), 2)


@triton.jit
def _rotations(x, y, z, BLOCKS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDE: tl.constexpr):
    cols = tl.arange(0, WIDE)
    row = tl.program_id(0) * HEAD_DIM + cols
    rotated = hadamard.rotate(tl.load(x + row, mask=cols < HEAD_DIM, other=0.0), BLOCKS)
    tl.store(y + row, rotated, mask=cols < HEAD_DIM)
    tl.store(z + row, hadamard.unrotate(rotated, BLOCKS), mask=cols < HEAD_DIM)


@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 80, 96, 112, 128, 192, 256])
def test_rotation(head_dim):
    """That of attnpatch.tbq4, and back."""
    x = torch.randn(3, head_dim)
    y, z = torch.full_like(x, math.nan), torch.full_like(x, math.nan)
    wide = 1 << (head_dim - 1).bit_length()
    _rotations[(3,)](x, y, z, tbq4.blocks_of(head_dim), head_dim, wide)
    torch.testing.assert_close(y.double(), tbq4.rotate(x.double()), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(z, x, rtol=1e-6, atol=2e-6)
    assert not torch.allclose(y, x, atol=0.1)


def test_dispatch_takes_the_kernel_of_codes():
    """Whatever the rows, even as many as there are keys."""
    triton_backends = [name for name in BACKEND_MODULES if name.startswith("triton.")]
    for rows in (1, 5, KEYS):
        call = codes(dense(seqlen_q=rows, lse=None), values=False)
        assert choose(call, triton_backends)[1].backend == "triton.tbq4"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cpu.sdpa", "TBQ4 codes, and torch's scaled_dot_product_attention"),
        ("triton.prefill", "K is TBQ4 codes, and"),
        ("triton.tbq4", None),
    ],
)
def test_who_takes_codes(name, sentence):
    found = load_backend(name).refuses(codes(dense(lse=None)))
    assert found is None if sentence is None else sentence in found


def test_refusals():
    refuses = load_backend("triton.tbq4").refuses
    assert refuses(dense()) == refuses(quantised(dense(), torch.int8)) == "neither K nor V is TBQ4 codes"
    wide = codes(dense(head_dim=264))
    assert refuses(wide) == "head_dim 264 is above 256, the widest tile of triton.tbq4"
    double = codes(dense())
    double = double._replace(q=double.q.double())
    assert refuses(double) == "float64 is not one of float16, bfloat16, float32"
    assert "sm_scale -1.0 is not positive" in refuses(codes(dense(sm_scale=-1.0)))


WRONG = {
    "no norms": ({"k_scale": None}, "k_scale is missing for k in torch.uint8"),
    "norms of another dtype": ({"v_scale": torch.ones(2, 1, KEYS, 1)}, "TBQ4 norms, which are float16; got torch.flo"),
    "norms of another length": ({"k_scale": torch.ones(2, 1, 5, 1).half()}, r"k_scale \(2, 1, 5, 1\) does not broad"),
    "norms of another number of blocks": (
        {"v_scale": torch.ones(2, 1, KEYS, 2).half()},
        r"v_scale .* does not broadcast to .*blocks of head_dim",
    ),
    "codes of another width": (
        {"k": torch.zeros(2, 1, KEYS, 16, dtype=torch.uint8)},
        r"must share head_dim; got 16 and 32 \(16 bytes of codes, two channels each\)",
    ),
    "a width that has no blocks": (
        {"v": torch.zeros(2, 1, KEYS, 6, dtype=torch.uint8)},
        "head_dim 12 is not a positive multiple of 8",
    ),
}


@pytest.mark.parametrize(("fields", "sentence"), WRONG.values(), ids=WRONG)
def test_bad_input_is_named(fields, sentence):
    call = codes(dense(lse=None))._replace(**fields)
    with pytest.raises(ValueError, match=sentence):
        ops.attention(call.q, call.k, call.v, call.sm_scale, k_scale=call.k_scale, v_scale=call.v_scale)


@st.composite
def steps(draw):
    """A call of any sizes, sides, terms and layout, and in how many splits."""
    batch, seqlen_q, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    seqlen_k = draw(st.integers(1, 90))
    heads = kv_heads * draw(st.integers(1, 2))
    offset = torch.tensor(draw(st.lists(st.integers(-2, seqlen_k), min_size=batch, max_size=batch)))
    call = random_call(
        *(batch, heads, kv_heads, seqlen_q, seqlen_k),
        head_dim=8 * draw(st.integers(1, 20)),
        head_dim_v=8 * draw(st.integers(1, 20)),
        dtype=torch.float16,  # float32, rotated both ways, was off by 1.2 times what is allowed
        q_offset=offset,
        window_left=draw(st.none() | st.integers(0, 50)),
        window_right=draw(st.none() | st.integers(0, 2)),
        softcap=draw(st.none() | st.just(5.0)),
        sinks=draw(st.none() | st.just(torch.randn(heads))),
        key_padding=draw(st.none() | st.just(bool_mask(batch, seqlen_k))),
        lse=draw(st.none() | st.just(True)),
        seed=draw(st.integers(0, 99)),
    )
    if call.key_padding is not None:
        call = poison(call, ~call.key_padding)
    sides = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    page_size = draw(st.none() | st.sampled_from([4, 32]))
    call = codes(call, *sides)
    return (call if page_size is None else paged(call, page_size)), draw(st.integers(1, 3))


@settings(max_examples=6, deadline=None)
@given(step=steps())
def test_any_step(step):
    check(*step)
