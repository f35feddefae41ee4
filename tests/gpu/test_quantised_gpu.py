"""8 bit keys and values on a CUDA device, unpacked in registers or converted, against float64 (TRITON_INTERPRET=0)."""

import pytest
import torch

from attnpatch.attention_call import QUANTISED
from attnpatch.kernels.decode.launch import decode
from attnpatch.testing.inputs import packed, paged, quantised
from tests.gpu.calls import CUDA, ON_GPU, bits, bool_mask, call_on_gpu, check, check_repeats, check_replays

pytestmark = ON_GPU

KEYS = 1500
HALVES = [torch.bfloat16, torch.float16]


def dense(**case):
    defaults = {"seqlen_q": 1, "seqlen_k": KEYS, "head_dim": 128, "q_offset": torch.tensor([1480, 700]), "lse": True}
    return call_on_gpu(**{**defaults, "window_right": 0, **case})


@pytest.fixture(params=QUANTISED, ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("per", ["token", "head"])
@pytest.mark.parametrize("rows", [1, 2, 4, 16, 64, 300])
@pytest.mark.parametrize("q_dtype", [*HALVES, torch.float32], ids=str)
def test_kinds(dtype, q_dtype, rows, per):
    check(quantised(dense(seqlen_q=rows, dtype=q_dtype), dtype, per))


@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 16, 32])
def test_groups(dtype, group):
    for rows in (1, 5):
        check(quantised(dense(seqlen_q=rows, num_heads=2 * group), dtype))


@pytest.mark.parametrize("q_dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [
        (16, 16),
        (32, 32),
        (40, 40),
        (64, 64),
        (80, 80),
        (96, 96),
        (100, 60),
        (128, 128),
        (192, 128),
        (256, 256),
        (33, 35),
    ],
    ids=str,
)
def test_head_dims(dtype, head_dim, head_dim_v, q_dtype):
    for rows in (1, 20):
        check(quantised(dense(seqlen_q=rows, head_dim=head_dim, head_dim_v=head_dim_v, dtype=q_dtype), dtype))


@pytest.mark.parametrize("q_dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [20, 300])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(100, 60), (128, 64), (192, 128), (64, 128)], ids=str)
def test_tiles_of_many_rows_and_two_widths(dtype, head_dim, head_dim_v, rows, q_dtype):
    """K and V of different padded widths: not unpacked in words there, which ptxas compiles to nonsense."""
    check(quantised(dense(seqlen_q=rows, head_dim=head_dim, head_dim_v=head_dim_v, dtype=q_dtype), dtype))


def every_number(dtype):
    """Every finite number of an 8 bit dtype."""
    x = torch.arange(256, dtype=torch.uint8, device=CUDA).view(dtype)
    return x if dtype == torch.int8 else x[x.float().isfinite()]


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("q_dtype", [*HALVES, torch.float32], ids=str)
def test_every_value(dtype, q_dtype, heads):
    """One key: the output of a query of zeros is its value, to the bit; the lse of one that picks a column, the key's.

    A query that picks a large key has p a little off 1 (exp2(s * scale - m) is one fma, m is rounded), and with it o.
    """
    values = every_number(dtype)
    values = torch.cat([values, values[: -len(values) % 128]]).view(-1, 1, 1, 128)
    x = values.repeat_interleave(128 // heads, dim=0)
    scale = torch.full(x.shape[:3], 0.25, device=CUDA)
    sizes = {"batch": len(x), "num_heads": heads, "num_kv_heads": 1, "seqlen_q": 1, "seqlen_k": 1, "head_dim": 128}
    call = call_on_gpu(**sizes, dtype=q_dtype, sm_scale=1.0, lse=True)
    picks = torch.eye(128, device=CUDA, dtype=q_dtype).view(128 // heads, heads, 1, 128).repeat(len(values), 1, 1, 1)
    call = call._replace(q=picks, k=x, v=x, k_scale=scale, v_scale=scale)
    o, expected = decode(call._replace(q=torch.zeros_like(picks))), values.float() * 0.25
    decode(call)
    assert torch.equal(o.float(), (x.float() * 0.25).to(q_dtype).float().expand_as(o))
    torch.testing.assert_close(call.lse.view(len(values), 128), expected.view(-1, 128), rtol=5e-7, atol=1e-30)


LAYOUTS = {
    "heads outside": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "an odd base": lambda x: torch.cat([x, x], dim=3)[..., 1 : 1 + x.shape[3]],
    "rows of odd length": lambda x: torch.cat([x, x[..., :1]], dim=3)[..., : x.shape[3]],
    "rows of 130": lambda x: torch.cat([x, x[..., :2]], dim=3)[..., : x.shape[3]],
    "expanded": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("which", ["k", "v", "both"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(dtype, layout, which):
    """Words are unpacked where elements lie in pairs, on either side; other layouts are converted."""
    call = quantised(dense(), dtype)
    as_bytes = {name: getattr(call, name).view(torch.int8) for name in "kv" if which in (name, "both")}
    check(call._replace(**{name: layout(x).view(dtype) for name, x in as_bytes.items()}))


def test_one_of_both(dtype):
    for rows in (1, 20):
        call = dense(seqlen_q=rows)
        both = quantised(call, dtype)
        check(both._replace(v=call.v, v_scale=None))
        check(both._replace(k=call.k, k_scale=None))
        check(both._replace(v=quantised(call, torch.int8).v, v_scale=quantised(call, torch.int8, "head").v_scale))


@pytest.mark.parametrize("q_dtype", HALVES, ids=str)
@pytest.mark.parametrize("per", ["token", "head"])
@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_sizes_of_values(dtype, size, per, q_dtype):
    """Scales may be far below and above what float16 holds exactly."""
    for rows in (1, 20):
        call = dense(seqlen_q=rows, dtype=q_dtype)
        check(quantised(call._replace(v=call.v * size), dtype, per))


TERMS = {
    "a window": {"window_left": 255},
    "rows that see nothing": {"q_offset": torch.tensor([-1, 1400])},
    "padding": {"key_padding": bool_mask(2, KEYS)},
    "bool mask": {"attn_mask": bool_mask(2, 1, 1, KEYS)},
    "softcap, sinks, slopes": {"softcap": 3.0, "sinks": torch.zeros(8), "alibi_slopes": torch.linspace(0.01, 1, 8)},
}


@pytest.mark.parametrize("per", ["token", "head"])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_terms(dtype, terms, per):
    for rows, num_splits in ((1, 0), (1, 1), (6, 7)):
        check(quantised(dense(seqlen_q=rows, **terms), dtype, per), num_splits)


@pytest.mark.parametrize("per", ["token", "head"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
def test_pages(dtype, page_size, per):
    for rows in (1, 20):
        check(paged(quantised(dense(seqlen_q=rows), dtype, per), page_size))


def test_packed(dtype):
    mix = [(1, 1500), (200, 900), (0, 40), (1, 1), (70, 70)]
    parts = [dense(batch=1, seqlen_q=q, seqlen_k=k, q_offset=k - q) for q, k in mix]
    call = packed([quantised(part, dtype) for part in parts], spare=5)
    check(call)
    check(paged(call, 16))


def test_repeats(dtype):
    check_repeats(quantised(dense(), dtype))


def test_a_graph_replays_while_sequences_grow(dtype):
    call = quantised(dense(), dtype)
    check_replays(call, "q_offset", ([0, 1400], [1480, 63], [-1, 64], [-1, -1]))


@pytest.mark.parametrize("rows", [1, 4])
def test_batch_invariant(dtype, rows):
    offsets = torch.tensor([0, 5000, 1023, 1024, 2047, 9], device=CUDA)
    call = quantised(dense(batch=6, seqlen_q=rows, seqlen_k=6000, q_offset=offsets, batch_invariant=True), dtype)
    together = bits(call)
    for batch in ([0], [1], [5, 4, 3, 2, 1, 0], [1] * 30):
        fields = {name: getattr(call, name)[batch] for name in ("q", "k", "v", "k_scale", "v_scale", "q_offset")}
        assert torch.equal(bits(call._replace(**fields)), together[batch]), batch
