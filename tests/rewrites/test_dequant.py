"""K and V multiplied out of codes: the operator gets codes and scales where a scale belongs to a row."""

import pytest
import torch
import torch.nn.functional as F

from attnpatch.attention_call import QUANTISED
from attnpatch.graph import shape, value
from attnpatch.testing.recording import RecordingBackend, check_rewrite, clones, record
from attnpatch.testing.tolerance import assert_same_function, run_float64
from tests.combinations import in_turn

B, H, HKV, S, D, DV = 2, 6, 2, 12, 16, 24
GROUP = H // HKV
INT8, FP8 = torch.int8, torch.float8_e4m3fn


def repeat_kv(x):
    b, heads, s, d = x.shape
    return x[:, :, None].expand(b, heads, GROUP, s, d).reshape(b, heads * GROUP, s, d)


def eager(q, k, v):
    return (q @ k.transpose(-1, -2) * 0.25).softmax(-1) @ v


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=0.25)


def codes(*sizes, dtype=INT8):
    return (torch.randn(sizes) * 40).clamp(-127, 127).to(dtype)


def scale(*sizes, dtype=torch.float32):
    return (torch.rand(sizes) * 0.05 + 0.01).to(dtype)


def args(dtype=INT8, rows=5, scales=(B, HKV, S, 1), q_dtype=torch.float32, scale_dtype=torch.float32):
    q = torch.randn(B, H, rows, D).to(q_dtype)
    k, v = codes(B, HKV, S, D, dtype=dtype), codes(B, HKV, S, DV, dtype=dtype)
    return q, k, scale(*scales, dtype=scale_dtype), v, scale(*scales, dtype=scale_dtype)


def of_operator(recording):
    """The one operator of a graph: the dtypes of its k and v, and the shapes of their scales."""
    (node,) = recording.named("attention")
    scales = (node.kwargs.get(name) for name in ("k_scale", "v_scale"))
    return *(value(x).dtype for x in node.args[1:3]), *(None if x is None else tuple(shape(x)) for x in scales)


def check_codes(function, *args, k=INT8, v=INT8, sizes=(B, HKV, S), **kwargs):
    """``function`` is rewritten to a call on codes of dtypes ``k`` and ``v``, and multiplies nothing out."""
    recording = check_rewrite(function, *args, **kwargs)
    assert recording.reasons == []
    sizes = tuple(sizes if dtype in QUANTISED else None for dtype in (k, v))
    assert of_operator(recording) == (k, v, *sizes)
    said = [f"{str(x).removeprefix('torch.')} {name}" for x, name in ((k, "K"), (v, "V")) if x in QUANTISED]
    assert recording.masks == [", ".join(["none", *said])]
    wide = [n for n in recording.named("mul", "to", "float", "bfloat16", "half") if shape(n)[-1:] in ((D,), (DV,))]
    assert [n for n in wide if shape(n)[-2] == S] == []
    return recording


def check_multiplied(function, *args, dtype=torch.float32, **kwargs):
    """``function`` is rewritten, and what it multiplies out is what attention reads."""
    recording = check_rewrite(function, *args, **kwargs)
    assert recording.reasons == []
    assert of_operator(recording) == (dtype, dtype, None, None)
    return recording


PRODUCTS = {
    "cast_mul": lambda x, s: x.to(s.dtype) * s,
    "mul_cast": lambda x, s: s * x.to(s.dtype),
    "torch_mul": lambda x, s: torch.mul(x.to(s.dtype), s),
    "method": lambda x, s: x.to(s.dtype).mul(s),
    "float_and_back": lambda x, s: (x.float() * s.float()).to(s.dtype),
    "float_method": lambda x, s: (x.float() * s).type(s.dtype),
    "unsqueezed": lambda x, s: x.to(s.dtype) * s.squeeze(-1).unsqueeze(-1),
    "of_rows": lambda x, s: x.to(s.dtype) * s[..., 0][..., None],
    "contiguous": lambda x, s: (x.to(s.dtype) * s).contiguous(),
    "transposed": lambda x, s: (x.transpose(1, 2).to(s.dtype) * s.transpose(1, 2)).transpose(1, 2),
    "flat_heads": lambda x, s: (x.flatten(0, 1).to(s.dtype) * s.flatten(0, 1)).view(B, HKV, S, -1),
}


@pytest.mark.parametrize(("product", "dtype", "attend"), in_turn(PRODUCTS, QUANTISED, [eager, sdpa]))
def test_scale_of_each_key(product, dtype, attend):
    def function(q, k, ks, v, vs):
        return attend(q, repeat_kv(product(k, ks)), repeat_kv(product(v, vs)))

    check_codes(function, *args(dtype), k=dtype, v=dtype)


@pytest.mark.parametrize("attend", [eager, sdpa])
def test_integers_multiplied_without_a_cast(attend):
    def function(q, k, ks, v, vs):
        return attend(q, repeat_kv(k * ks), repeat_kv(vs * v))

    check_codes(function, *args())


SIZES = {
    "head": ((1, HKV, 1, 1), (1, HKV, 1)),
    "head_without_batch": ((HKV, 1, 1), (1, HKV, 1)),
    "sequence": ((B, 1, 1, 1), (B, 1, 1)),
    "key": ((B, 1, S, 1), (B, 1, S)),
    "position": ((S, 1), (1, 1, S)),
    "tensor": ((), (1, 1, 1)),
    "one": ((1,), (1, 1, 1)),
}


@pytest.mark.parametrize(("scales", "attend"), in_turn(SIZES, [eager, sdpa]))
def test_coarser_scales(scales, attend):
    given, sizes = scales

    def function(q, k, ks, v, vs):
        return attend(q, repeat_kv(k.float() * ks), repeat_kv(v.float() * vs))

    check_codes(function, *args(scales=given), sizes=sizes)


@pytest.mark.parametrize("attend", [eager, sdpa])
def test_number(attend):
    def function(q, k, v):
        return attend(q, repeat_kv(k.float() * 0.02), repeat_kv(0.03 * v.float()))

    q, k, _, v, _ = args()
    check_codes(function, q, k, v, sizes=(1, 1, 1))


@pytest.mark.parametrize("attend", [eager, sdpa])
def test_no_scale(attend):
    """Eight bit floats that are the values themselves."""

    def function(q, k, v):
        return attend(q, repeat_kv(k.float()), repeat_kv(v.to(torch.float32)))

    q, k, _, v, _ = args(FP8)
    check_codes(function, q, k, v, k=FP8, v=FP8, sizes=(1, 1, 1))


@pytest.mark.parametrize("attend", [eager, sdpa])
def test_two_scales_and_a_number(attend):
    def function(q, k, ks, v, vs, of_head):
        return attend(q, repeat_kv(k.float() * ks * of_head * 0.5), repeat_kv(of_head * (vs * v.float())))

    check_codes(function, *args(), scale(1, HKV, 1, 1) * 30)


ROUNDED = {name: PRODUCTS[name] for name in ("cast_mul", "mul_cast", "float_and_back", "float_method")}


@pytest.mark.parametrize(("product", "attend"), in_turn(ROUNDED, [eager, sdpa]))
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(q_dtype, product, attend):
    """The operator multiplies in float32 what the original rounds to q's dtype once or twice."""

    def function(q, k, ks, v, vs):
        return attend(q, *(repeat_kv(product(x, s)) for x, s in ((k, ks), (v, vs))))

    check_codes(function, *args(q_dtype=q_dtype, scale_dtype=q_dtype))


def test_q_widened_to_the_product():
    """bfloat16 q, in float32 with codes multiplied out to float32: they stand for more than bfloat16 holds."""

    def function(q, k, ks, v, vs):
        return eager(q.float(), repeat_kv(k.float() * ks), repeat_kv(v.float() * vs))

    recording = check_codes(function, *args(q_dtype=torch.bfloat16))
    assert value(recording.named("attention")[0].args[0]).dtype == torch.float32


@pytest.mark.parametrize("quantised", ["k", "v"])
@pytest.mark.parametrize("attend", [eager, sdpa])
def test_one_of_both(attend, quantised):
    def function(q, k, ks, v, vs):
        k, v = (x * s if x.dtype == INT8 else x for x, s in ((k, ks), (v, vs)))
        return attend(q, repeat_kv(k), repeat_kv(v))

    q, k, ks, v, vs = args()
    k, v = (k, torch.randn(B, HKV, S, DV)) if quantised == "k" else (torch.randn(B, HKV, S, D), v)
    check_codes(function, q, k, ks, v, vs, k=k.dtype, v=v.dtype)


@pytest.mark.parametrize("attend", [eager, sdpa])
def test_codes_and_scales_repeated_each(attend):
    def function(q, k, ks, v, vs):
        return attend(q, repeat_kv(k).float() * repeat_kv(ks), repeat_kv(v).float() * vs.repeat_interleave(GROUP, 1))

    recording = check_codes(function, *args())
    assert recording.sites[0].num_kv_heads == HKV


@pytest.mark.parametrize("attend", [eager, sdpa])
def test_dynamic_shapes(attend):
    def function(q, k, ks, v, vs):
        return attend(q, k.float() * ks, v.float() * vs)

    q, k, ks, v, vs = args()
    recording = check_rewrite(function, q[:, :HKV], k, ks, v, vs, dynamic=True)
    assert recording.masks == ["none, int8 K, int8 V"]


def test_a_cache_of_fp8_that_grows():
    """transformers' Fp8QuantizedLayer: the concatenation of codes, one scale, the product in q's dtype."""

    def function(q, past, new, s):
        k = v = (torch.cat([past, (new / s).to(FP8)], dim=-2).float() * s).to(q.dtype)
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    past, new = codes(B, HKV, S - 1, D, dtype=FP8), torch.randn(B, HKV, 1, D)
    check_codes(function, torch.randn(B, H, 1, D), past, new, torch.tensor(0.02), k=FP8, v=FP8, sizes=(1, 1, 1))


def test_scale_moved_to_the_scores():
    """A number on K alone is part of the scale of the scores, as it was without codes."""

    def function(q, k, v):
        return (q @ (k.float().mT * 0.02) * 0.25).softmax(-1) @ (v.float() * 0.02)

    q, k, _, v, _ = args()
    (node,) = check_codes(function, q[:, :HKV], k, v, sizes=(1, 1, 1)).named("attention")
    assert node.args[3] == pytest.approx(0.25 * 0.02)


# With a gather

PAGES, BLOCKS, PAGE = 9, 3, 4


def keys(pool, ids):
    """[pages, kv heads, page, ...] as [batch, kv heads, keys, ...]."""
    return pool[ids].transpose(1, 2).flatten(2, 3)


GATHERED = {
    "product_of_gathers": lambda x, s, ids: keys(x, ids).float() * keys(s, ids)[..., None],
    "product_of_pages": lambda x, s, ids: (x[ids].float() * s[ids][..., None]).transpose(1, 2).flatten(2, 3),
    "gather_of_product": lambda x, s, ids: keys(x.float() * s[..., None], ids),
    "scale_of_rows": lambda x, s, ids: keys(x, ids).float() * keys(s[..., None], ids),
    "repeated": lambda x, s, ids: repeat_kv(keys(x, ids)).float() * repeat_kv(keys(s[..., None], ids)),
}


@pytest.mark.parametrize("attend", [eager, sdpa])
@pytest.mark.parametrize("make", GATHERED, ids=str)
def test_pool_and_scales_gathered_by_one_table(make, attend):
    def function(q, k, ks, v, vs, ids):
        k, v = (GATHERED[make](x, s, ids) for x, s in ((k, ks), (v, vs)))
        return attend(q, *(x if make == "repeated" else repeat_kv(x) for x in (k, v)))

    ids = torch.randperm(PAGES)[: B * BLOCKS].reshape(B, BLOCKS)
    pools = [x for width in (D, DV) for x in (codes(PAGES, HKV, PAGE, width), scale(PAGES, HKV, PAGE))]
    recording = check_rewrite(function, torch.randn(B, H, 5, D), *pools, ids)
    assert recording.masks == ["none, pages, int8 K, int8 V"]
    assert of_operator(recording) == (INT8, INT8, (PAGES, HKV, PAGE), (PAGES, HKV, PAGE))
    assert shape(recording.named("attention")[0].args[1]) == (PAGES, HKV, PAGE, D)


def test_one_scale_for_a_page():
    def function(q, k, v, s, ids):
        k, v = ((x[ids].float() * s[ids][..., None, None]).transpose(1, 2).flatten(2, 3) for x in (k, v))
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    ids = torch.randperm(PAGES)[: B * BLOCKS].reshape(B, BLOCKS)
    pools = [codes(PAGES, HKV, PAGE, D) for _ in range(2)]
    recording = check_rewrite(function, torch.randn(B, H, 5, D), *pools, scale(PAGES, HKV), ids)
    assert of_operator(recording) == (INT8, INT8, (PAGES, HKV, 1), (PAGES, HKV, 1))


def test_one_scale_for_a_head_of_a_pool():
    def function(q, k, v, s, ids):
        return sdpa(q, *(repeat_kv(keys(x, ids).float() * s) for x in (k, v)))

    ids = torch.randperm(PAGES)[: B * BLOCKS].reshape(B, BLOCKS)
    pools = [codes(PAGES, HKV, PAGE, D) for _ in range(2)]
    recording = check_rewrite(function, torch.randn(B, H, 5, D), *pools, scale(1, HKV, 1, 1), ids)
    assert recording.masks == ["none, pages, int8 K, int8 V"]
    assert of_operator(recording) == (INT8, INT8, (1, HKV, 1), (1, HKV, 1))


@pytest.mark.parametrize("attend", [eager, sdpa])
def test_scales_by_sequence_on_codes_in_pages(attend):
    """The scales are not in the pool: the codes are gathered, and stay codes."""

    def function(q, k, ks, v, vs, ids):
        k, v = (keys(x, ids).float() * s for x, s in ((k, ks), (v, vs)))
        return attend(q, repeat_kv(k), repeat_kv(v))

    ids = torch.randperm(PAGES)[: B * BLOCKS].reshape(B, BLOCKS)
    pools = [x for width in (D, DV) for x in (codes(PAGES, HKV, PAGE, width), scale(B, HKV, BLOCKS * PAGE, 1))]
    recording = check_rewrite(function, torch.randn(B, H, 5, D), *pools, ids)
    assert recording.masks == ["none, int8 K, int8 V"]
    assert of_operator(recording) == (INT8, INT8, (B, HKV, S), (B, HKV, S))


def test_scales_gathered_by_another_table():
    def function(q, k, ks, v, vs, ids, others):
        return sdpa(q, *(repeat_kv(keys(x, ids).float() * keys(s, others)[..., None]) for x, s in ((k, ks), (v, vs))))

    ids = torch.randperm(PAGES)[: B * BLOCKS].reshape(B, BLOCKS)
    pools = [x for width in (D, DV) for x in (codes(PAGES, HKV, PAGE, width), scale(PAGES, HKV, PAGE))]
    recording = check_rewrite(function, torch.randn(B, H, 5, D), *pools, ids, ids.flip(1))
    assert recording.masks == ["none, int8 K, int8 V"]


# What must stay multiplied out

LEFT = {
    "channel": lambda x, s: x.float() * s[:, :, :1].expand(-1, -1, 1, x.shape[-1]).cumsum(-1),
    "element": lambda x, s: x.float() * (s + torch.arange(x.shape[-1]) * 0.01),
    "group_of_channels": lambda x, s: (x.unflatten(-1, (2, -1)).float() * torch.stack([s, 2 * s], dim=-2)).flatten(
        -2, -1
    ),
    "zero_point": lambda x, s: (x.float() - 3) * s,
    "zero_point_after": lambda x, s: x.float() * s + 0.5,
    "inverse_scale": lambda x, s: x.float() / (1 / s),
    "uint8": lambda x, s: x.view(torch.uint8).float() * s * 0.1,
    "in_place": lambda x, s: x.float().mul_(s),
    "requantised": lambda x, s: (x.float() * s).to(FP8).float() * s,
    "power": lambda x, s: x.float() * s**2 * x.float().sign(),
}


@pytest.mark.parametrize("attend", [eager, sdpa])
@pytest.mark.parametrize("product", [n for n in LEFT if n != "requantised"])
def test_what_is_no_scale_of_rows(product, attend):
    def function(q, k, ks, v, vs):
        return attend(q, repeat_kv(LEFT[product](k, ks)), repeat_kv(LEFT[product](v, vs)))

    check_multiplied(function, *args())


@pytest.mark.parametrize("attend", [eager, sdpa])
def test_float64_is_multiplied_out(attend):
    """Scales are float32 in the operator."""

    def function(q, k, ks, v, vs):
        return attend(q, repeat_kv(k.double() * ks), repeat_kv(v * 0.02 * vs))

    check_multiplied(function, *args(q_dtype=torch.float64, scale_dtype=torch.float64), dtype=torch.float64)


def test_scale_of_another_device():
    """A number in a tensor of the CPU scales codes of any device; the operator takes tensors of one."""

    def function(q, k, v, s):
        return sdpa(q, repeat_kv(k.float() * s), repeat_kv(v.float() * s))

    q, k, _, v, _ = (x.to("meta") for x in args())
    recording = record(function, q, k, v, torch.tensor(0.02))
    assert (recording.reasons, of_operator(recording)) == ([], (torch.float32, torch.float32, None, None))


def test_codes_made_in_the_graph_are_where_it_ends():
    """A product that is quantised again: the second codes are what attention reads, not the first."""

    def function(q, k, ks, v, vs):
        return sdpa(q, *(repeat_kv(LEFT["requantised"](x, s)) for x, s in ((k, ks), (v, vs))))

    recording = check_rewrite(function, *args())
    assert of_operator(recording) == (FP8, FP8, (B, HKV, S), (B, HKV, S))


def test_scales_that_differ_within_a_group_of_heads():
    """Codes repeated, scales not: the scale belongs to query heads, so that K has as many."""

    def function(q, k, ks, v, vs):
        return sdpa(q, repeat_kv(k).float() * ks, repeat_kv(v).float() * vs)

    recording = check_rewrite(function, *args(scales=(B, H, S, 1)))
    assert recording.reasons == []
    assert recording.sites[0].num_kv_heads == H


@pytest.mark.parametrize("written", ["codes", "scales"])
@pytest.mark.parametrize("attend", [eager, sdpa])
def test_a_write_after_the_product_keeps_it(attend, written):
    def function(q, k, ks, v, vs):
        keys, values = repeat_kv(k.float() * ks), repeat_kv(v.float() * vs)
        k.zero_() if written == "codes" else ks.zero_()
        return attend(q, keys, values)

    backend = RecordingBackend()
    given = args()
    ours, theirs = clones(given), clones(given)
    with torch.no_grad():
        y, original = torch.compile(function, backend=backend)(*ours), function(*theirs)
        y64 = run_float64(function, *clones(given))
    assert_same_function(y, original, y64)
    assert backend.reasons == []
    assert of_operator(backend)[0] == torch.float32


def test_gradients_need_the_product():
    def function(q, k, ks, v, vs):
        return sdpa(q, repeat_kv(k.float() * ks), repeat_kv(v.float() * vs))

    q, k, ks, v, vs = args()
    ks.requires_grad_()
    backend = RecordingBackend()
    (ours,) = torch.autograd.grad(torch.compile(function, backend=backend)(q, k, ks, v, vs).square().sum(), ks)
    (theirs,) = torch.autograd.grad(function(q, k, ks, v, vs).square().sum(), ks)
    torch.testing.assert_close(ours, theirs)
    assert of_operator(backend) == (torch.float32, torch.float32, None, None)


WRITTEN = {
    "codes_cast": lambda x, s, new: put(x.float(), new) * s,
    "product": lambda x, s, new: put(x.float() * s, new),
    "repeated": lambda x, s, new: put(repeat_kv(x.float() * s), new),
}


def put(x, new):
    x[:, :, -1] = new
    return x


@pytest.mark.parametrize("attend", [eager, sdpa])
@pytest.mark.parametrize("product", WRITTEN.values(), ids=WRITTEN)
def test_a_write_into_what_was_multiplied_out_is_not_lost(product, attend):
    """The newest key put in as it is: the codes do not stand for it."""

    def function(q, k, ks, v, vs, new_k, new_v):
        k, v = product(k, ks, new_k), product(v, vs, new_v)
        return attend(q, *(x if x.shape[1] == H else repeat_kv(x) for x in (k, v)))

    check_multiplied(function, *args(), torch.randn(D), torch.randn(DV))
