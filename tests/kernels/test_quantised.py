"""8 bit keys and values in the interpreter, where they are converted element by element, against float64.

Unpacking words in registers is inline PTX: tests/gpu/test_quantised_gpu.py.
"""

import pytest
import torch

from attnpatch.attention_call import QUANTISED
from attnpatch.kernels.decode.launch import decode
from attnpatch.kernels.decode.unpack import UNPACKING, Form, form_of, is_per_head
from attnpatch.testing.inputs import packed, paged, quantised, random_call
from tests.kernels.calls import bool_mask, check

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero):RuntimeWarning")  # numpy's, not a kernel's

KEYS = 130


def dense(**case):
    sizes = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "seqlen_q": 1, "seqlen_k": KEYS, "head_dim": 16}
    terms = {"q_offset": torch.tensor([120, 17]), "window_right": 0, "lse": True, "dtype": torch.float16}
    return random_call(**{**sizes, **terms, **case})


@pytest.fixture(params=QUANTISED, ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("q_dtype", "per"), [(torch.float16, "token"), (torch.float16, "head"), (torch.float32, "token")], ids=str
)
def test_kinds(dtype, q_dtype, rows, per):
    check(quantised(dense(seqlen_q=rows, dtype=q_dtype), dtype, per), 2)


def test_any_number_of_rows(dtype):
    """triton.append takes more than 64 here: no other kernel of Triton reads 8 bits."""
    check(quantised(dense(batch=1, num_heads=1, num_kv_heads=1, seqlen_q=70, q_offset=40), dtype))


def test_every_value(dtype):
    """One key: the output is its value, to the bit. The interpreter rounds e5m2's subnormals to normal float16."""
    q_dtype = torch.float32 if dtype == torch.float8_e5m2 else torch.float16
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    codes = codes if dtype == torch.int8 else codes[codes.float().isfinite()]
    x = torch.cat([codes, codes[: -len(codes) % 64]]).view(-1, 1, 1, 64)
    scale = torch.full(x.shape[:3], 0.25)
    call = random_call(len(x), 1, 1, 1, 1, 64, dtype=q_dtype)
    call = call._replace(k=x, v=x, k_scale=scale, v_scale=scale)
    assert torch.equal(decode(call).float(), x.float() * 0.25)


@pytest.mark.parametrize("per", ["token", "head"])
@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_sizes_of_values(dtype, size, per):
    """Scales of float16 values may be far below and above what float16 holds exactly; probabilities times them are."""
    call = dense(q_offset=129)
    check(quantised(call._replace(v=call.v * size), dtype, per), 2)


def test_a_long_value_that_no_query_looks_at(dtype):
    """Probabilities times scales fit float16 beside one of 1e6 times the size, of weight 0."""
    call = dense(batch=1, num_heads=1, num_kv_heads=1, q_offset=129)
    k, v = call.k.clone(), call.v * 1e-3
    k[:, :, 40] = -8 * call.q[:, :, 0]
    v[:, :, 40] *= 1e6
    check(quantised(call._replace(k=k, v=v), dtype))


def test_scales_count():
    """Twice the scale is twice the value; of K, twice the score."""
    call = quantised(dense(dtype=torch.float32), torch.int8)
    o = check(call)
    assert torch.equal(check(call._replace(v_scale=call.v_scale * 2)), o * 2)
    sharper = check(call._replace(k_scale=call.k_scale * 2))
    torch.testing.assert_close(sharper, decode(call._replace(sm_scale=call.sm_scale * 2)), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(sharper, o, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 3])
def test_one_of_both(dtype, rows):
    call = dense(seqlen_q=rows)
    both, other = quantised(call, dtype), quantised(call, torch.int8, "head")
    check(both._replace(v=call.v, v_scale=None), 2)
    check(both._replace(k=call.k, k_scale=None), 2)
    check(both._replace(v=other.v, v_scale=other.v_scale), 2)


TERMS = {
    "a window": {"window_left": 40},
    "rows that see nothing": {"q_offset": torch.tensor([-1, 128])},
    "padding": {"key_padding": bool_mask(2, KEYS)},
    "bool mask": {"attn_mask": bool_mask(2, 1, 1, KEYS)},
    "softcap, sinks, slopes": {"softcap": 3.0, "sinks": torch.zeros(4), "alibi_slopes": torch.linspace(0, 1, 4)},
}


@pytest.mark.parametrize("per", ["token", "head"])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_terms(terms, per):
    check(quantised(dense(**terms), torch.float8_e4m3fn, per), 2)


@pytest.mark.parametrize("per", ["token", "head"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages(dtype, page_size, per):
    """A scale lies beside its key in the pool, and is NaN in pages of no sequence."""
    check(paged(quantised(dense(), dtype, per), page_size), 2)


def test_packed(dtype):
    mix = [(1, 70), (5, 9), (0, 3), (2, 66)]
    parts = [dense(batch=1, seqlen_q=q, seqlen_k=k, q_offset=k - q) for q, k in mix]
    call = packed([quantised(part, dtype) for part in parts], spare=3)
    check(call)
    check(paged(call, 16))


LAYOUTS = {
    "heads outside": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "an odd base": lambda x: torch.cat([x, x], dim=3)[..., 1 : 1 + x.shape[3]],
    "one head for all": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout):
    call = quantised(dense(), torch.int8)
    check(call._replace(k=layout(call.k), v=layout(call.v)), 2)


def test_layouts_of_scales():
    """``[batch, keys, heads]`` as caches have it, and one number."""
    call = quantised(dense(), torch.int8)
    by_key = call.k_scale.transpose(1, 2).contiguous().transpose(1, 2)
    check(call._replace(k_scale=by_key, v_scale=torch.tensor(0.1).expand(call.v.shape[:3])), 2)


def test_which_scales_are_per_head():
    token, head = (quantised(dense(), torch.int8, per).k_scale for per in ("token", "head"))
    assert is_per_head(head, paged=False)
    assert not is_per_head(token, paged=False)
    assert not is_per_head(None, paged=False)
    by_page = torch.ones(9, 2, 1).expand(9, 2, 16)
    assert not is_per_head(by_page, paged=True)
    assert is_per_head(by_page[:1].expand(9, 2, 16), paged=True)


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_unpacked(dtype, q_dtype, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x = torch.zeros(1, 2, 64, 130, dtype=torch.int8).view(dtype)
    form = form_of(x[..., :128], q_dtype, 2, 16)
    assert form.unpack is not None
    assert (form.step, form.tiles, form.aligned) == (2, 1, False)
    assert [getattr(n, "value", n) for n in form.strides] == [x.stride(0) // 2, x.stride(1) // 2, 65, 1]
    for odd in (x[..., :127], x[..., :30], x.transpose(2, 3), x[..., ::2]):
        assert form_of(odd, q_dtype, 16, 16) == Form(None, odd.stride())
    assert form_of(x, q_dtype, 1, 16) == form_of(x, torch.float32, 16, 16) == Form(None, x.stride())


def test_nothing_is_unpacked_on_the_cpu():
    for x, y in UNPACKING:
        tile = torch.empty(1, 2, 64, 128, dtype=x)
        assert form_of(tile, y, 16, 16) == Form(None, tile.stride())
    assert {x for x, _ in UNPACKING} == set(QUANTISED)
