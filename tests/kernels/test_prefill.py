"""triton.prefill in the interpreter: every term, awkward sizes and layouts, against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch.attention_call import AttentionCall
from attnpatch.dispatch import load_backend
from attnpatch.kernels.common import support
from attnpatch.kernels.prefill import launch
from attnpatch.testing.inputs import check_backend, random_call

BACKEND = load_backend("triton.prefill")
NEG = torch.finfo(torch.float32).min

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero):RuntimeWarning")  # numpy's, not a kernel's


def check(**case):
    """float16 unless the row says otherwise: bfloat16 products are wrong in the interpreter."""
    defaults = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": torch.float16}
    return check_backend(BACKEND, random_call(**{**defaults, **case}))


def bool_mask(*shape, keep=0.7):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < keep


def bias(*shape, dtype=torch.float32, hide=0.0, constant=NEG):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return values.to(dtype).masked_fill(~bool_mask(*shape, keep=1 - hide), constant)


@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 128])
def test_head_dims(head_dim):
    check(head_dim=head_dim, seqlen_q=20, window_right=0)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (24, 72), (64, 8)])
def test_head_dim_v_differs(head_dim, head_dim_v):
    check(head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=20, window_right=0)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (3, 1), (8, 2), (8, 1)], ids=lambda n: str(n))
def test_groups(num_heads, num_kv_heads):
    check(num_heads=num_heads, num_kv_heads=num_kv_heads, batch=2, seqlen_q=9)


@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 111, 130])
@pytest.mark.parametrize("terms", [{}, {"window_right": 0}], ids=["full", "causal"])
def test_lengths(seqlen, terms):
    check(num_heads=1, seqlen_q=seqlen, **terms)


@pytest.mark.parametrize("terms", [{}, {"window_right": 0}], ids=["full", "causal"])
def test_float32(terms):
    check(dtype=torch.float32, num_heads=4, seqlen_q=130, head_dim=64, **terms)


BANDS = {
    "bottom-right": {"seqlen_q": 65, "seqlen_k": 130, "q_offset": 65, "window_right": 0},
    "one row at the end": {"seqlen_q": 1, "seqlen_k": 70, "q_offset": 69, "window_right": 0},
    "cache with room": {"seqlen_q": 5, "seqlen_k": 130, "q_offset": 66, "window_right": 0},
    "rows without keys": {"seqlen_q": 80, "seqlen_k": 20, "q_offset": -60, "window_right": 0},
    "no row has keys": {"seqlen_q": 5, "seqlen_k": 20, "q_offset": -60, "window_right": 0},
    "past the keys": {"seqlen_q": 70, "seqlen_k": 20, "q_offset": 30, "window_right": 0, "window_left": 15},
    "window 1": {"seqlen_q": 70, "window_left": 0, "window_right": 0},
    "window 20": {"seqlen_q": 130, "window_left": 19, "window_right": 0},
    "window 70": {"seqlen_q": 200, "window_left": 69, "window_right": 0},
    "window on both sides": {"seqlen_q": 130, "window_left": 10, "window_right": 30},
    "left side only": {"seqlen_q": 130, "window_left": 10},
    "right side only": {"seqlen_q": 70, "window_right": 40},
    "window, offset": {"seqlen_q": 66, "seqlen_k": 200, "q_offset": 100, "window_left": 40, "window_right": 0},
}


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_bands(band):
    check(num_heads=1, **band)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("offset", [65, [65, 3], [-4, 129]], ids=str)
def test_offset_on_the_device(offset, dtype):
    check(batch=2, seqlen_q=6, seqlen_k=130, q_offset=torch.tensor(offset, dtype=dtype), window_right=0)


def test_offset_expanded_over_the_batch():
    check(batch=2, seqlen_q=6, seqlen_k=70, q_offset=torch.tensor([64]).expand(2), window_right=0)


PADDINGS = {
    "left": torch.arange(70) >= torch.tensor([[0], [33]]),
    "right": torch.arange(70) < torch.tensor([[70], [3]]),
    "holes": bool_mask(2, 70, keep=0.5),
    "a sequence without a key": torch.tensor([[True], [False]]).expand(2, 70),
}


@pytest.mark.parametrize("terms", [{}, {"window_right": 0}], ids=["full", "causal"])
@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
def test_padding(padding, terms):
    check(batch=2, seqlen_q=70, key_padding=padding, **terms)


MASKS = {
    "bool, per head": bool_mask(2, 2, 70, 70),
    "bool, one for all": bool_mask(1, 1, 70, 70),
    "bool, one row": bool_mask(2, 1, 1, 70),
    "bool, hidden rows": bool_mask(1, 1, 70, 70) & (torch.arange(70)[:, None] % 3 > 0),
    "bias, per head": bias(1, 2, 70, 70),
    "bias, one row": bias(1, 1, 1, 70),
    "bias, transposed": bias(1, 1, 70, 70).transpose(2, 3),
    "float16 minimum": bias(1, 1, 70, 70, dtype=torch.float16, hide=0.3, constant=-65504.0),
    "bfloat16 -1e9": bias(1, 1, 70, 70, dtype=torch.bfloat16, hide=0.3, constant=-1e9),
    "float32 minimum": bias(1, 1, 70, 70, hide=0.3),
    "float64 minimum": bias(1, 1, 70, 70, dtype=torch.float64, hide=0.3, constant=torch.finfo(torch.float64).min),
    "-inf": bias(1, 1, 70, 70, hide=0.3, constant=-math.inf),
    "-100 is a bias": bias(1, 1, 70, 70, hide=0.9, constant=-100.0),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks(mask):
    check(batch=2, seqlen_q=70, attn_mask=mask)


def test_every_term_at_once():
    check(
        batch=2,
        seqlen_q=70,
        seqlen_k=100,
        attn_mask=bias(1, 2, 70, 100, hide=0.2),
        key_padding=bool_mask(2, 100),
        q_offset=torch.tensor([30, 10]),
        window_left=40,
        window_right=0,
        softcap=5.0,
    )


@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("sm_scale", [0.25, 3000.0], ids=["small", "large"])
def test_softcap(softcap, sm_scale):
    check(dtype=torch.float32, seqlen_q=70, softcap=softcap, sm_scale=sm_scale, window_right=0)


def test_large_logits():
    check(dtype=torch.float32, seqlen_q=70, sm_scale=1000.0, window_right=0)


def test_no_keys():
    assert not check(seqlen_q=3, seqlen_k=0).any()


def test_no_rows():
    assert BACKEND.run(random_call(seqlen_q=0, seqlen_k=4)).shape == (1, 4, 0, 64)


def poison(call, dead):
    """NaN in the keys and values of every key that bool ``dead`` ``[batch, seqlen_k]`` marks."""
    k, v = call.k.clone(), call.v.clone()
    for x in (k, v):
        x.masked_fill_(dead[:, None, :, None], math.nan)
    return call._replace(k=k, v=v)


def test_poisoned_tail_of_a_cache():
    call = random_call(2, 2, 1, 5, 100, 16, dtype=torch.float16, q_offset=torch.tensor([30, 7]), window_right=0)
    check_backend(BACKEND, poison(call, torch.arange(100) > torch.tensor([[34], [11]])))


def test_poisoned_keys_left_of_a_window():
    call = random_call(1, 2, 1, 5, 100, 16, dtype=torch.float16, q_offset=80, window_left=10, window_right=0)
    check_backend(BACKEND, poison(call, (torch.arange(100) < 70)[None]))


def test_poisoned_padding():
    padding = PADDINGS["holes"]
    call = random_call(2, 2, 1, 70, 70, 16, dtype=torch.float16, key_padding=padding)
    check_backend(BACKEND, poison(call, ~padding))


def test_poisoned_keys_that_a_mask_hides():
    mask = bool_mask(2, 1, 70, 70) & PADDINGS["left"][:, None, None]
    call = random_call(2, 2, 1, 70, 70, 16, dtype=torch.float16, attn_mask=mask)
    check_backend(BACKEND, poison(call, ~PADDINGS["left"]))


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).half()


def base():
    return random_call(2, 2, 2, 70, 70, 32, dtype=torch.float16, window_right=0)


LAYOUTS = {
    "heads outside": lambda c: c._replace(q=c.q.contiguous(), k=c.k.contiguous(), v=c.v.contiguous()),
    "k transposed": lambda c: c._replace(k=c.k.transpose(2, 3).contiguous().transpose(2, 3)),
    "sliced out of a fused projection": lambda c: c._replace(q=noise(2, 70, 2, 96).transpose(1, 2)[..., 32:64]),
    "every second key": lambda c: c._replace(k=noise(2, 2, 140, 32)[:, :, ::2]),
    "every second channel": lambda c: c._replace(v=noise(2, 2, 70, 64)[..., ::2]),
    "one key head for all": lambda c: c._replace(k=c.k[:, :1].expand(2, 2, 70, 32)),
    "one sequence for all": lambda c: c._replace(v=c.v[:1].expand(2, 2, 70, 32)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout):
    check_backend(BACKEND, layout(base()))


def test_a_permuted_batch_gives_permuted_bits():
    call = base()
    flipped = call._replace(q=call.q.flip(0), k=call.k.flip(0), v=call.v.flip(0))
    assert torch.equal(BACKEND.run(flipped), BACKEND.run(call).flip(0))


def test_sections_of_heads(monkeypatch):
    """The last section may hold fewer heads than the others."""
    monkeypatch.setattr(support, "_plans", {})
    monkeypatch.setattr(launch, "SECTION_BYTES", 1)
    check(batch=1, num_heads=6, num_kv_heads=3, seqlen_q=70, window_right=0)
    support._plans.clear()
    monkeypatch.setattr(launch, "_heads_per_section", lambda call: 4)
    check(batch=1, num_heads=6, num_kv_heads=3, seqlen_q=70, window_right=0)


def test_descriptors(monkeypatch):
    """K and V through tensor descriptors, as compute capability 9.0 reads them."""
    monkeypatch.setattr(launch, "capability", lambda device: (9, 0))
    call = random_call(2, 2, 1, 70, 100, 40, 72, torch.float16, q_offset=30, window_left=50, window_right=0)
    assert launch.uses_descriptors(call)
    check_backend(BACKEND, call)


def half(*shape):
    return torch.empty(shape, dtype=torch.float16)


DESCRIPTOR_LAYOUTS = {
    "rows of 16 bytes": (half(2, 3, 5, 8), True),
    "heads inside": (half(2, 5, 3, 8).transpose(1, 2), True),
    "size 1 with an odd stride": (half(1, 1, 5, 8).as_strided((1, 1, 5, 8), (3, 7, 8, 1)), True),
    "inner stride 2": (half(2, 3, 5, 16)[..., ::2], False),
    "rows of 12 bytes": (half(2, 3, 5, 6), False),
    "base off by one": (half(2, 3, 5, 16)[..., 1:9], False),
    "expanded": (half(1, 3, 5, 8).expand(2, 3, 5, 8), False),
    "no keys": (half(2, 3, 0, 8), False),
}


@pytest.mark.parametrize(("x", "fits"), DESCRIPTOR_LAYOUTS.values(), ids=DESCRIPTOR_LAYOUTS)
def test_what_fits_a_descriptor(x, fits):
    assert launch.fits_descriptor(x) == fits


REFUSALS = {
    "float64 is not one of float16, bfloat16, float32": {"dtype": torch.float64},
    "head_dim 320 is above 256, the widest tile of triton.prefill": {"head_dim": 320},
    "head_dim 264 is above 256, the widest tile of triton.prefill": {"head_dim": 64, "head_dim_v": 264},
    "sm_scale -0.5 is not positive, so the largest product is not the largest score": {"sm_scale": -0.5},
}


@pytest.mark.parametrize(("sentence", "case"), REFUSALS.items(), ids=REFUSALS)
def test_refusals(sentence, case):
    assert BACKEND.refuses(random_call(seqlen_q=2, **case)) == sentence


def test_refuses_old_devices(monkeypatch):
    monkeypatch.setattr(support, "capability", lambda device: (7, 5))
    assert BACKEND.refuses(random_call(seqlen_q=2)) == "compute capability 7.5 is below 8.0"


def test_refuses_without_triton(monkeypatch):
    monkeypatch.setattr(support, "has_triton", lambda: False)
    assert BACKEND.refuses(random_call(seqlen_q=2)) == "Triton is not installed (pip install triton)"


@st.composite
def calls(draw) -> AttentionCall:
    batch, num_kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    seqlen_q, seqlen_k = draw(st.integers(1, 80)), draw(st.integers(1, 80))
    side = st.none() | st.integers(0, 90)
    terms = {
        "q_offset": draw(st.integers(-20, 80)),
        "window_left": draw(side),
        "window_right": draw(side),
        "softcap": draw(st.none() | st.just(3.0)),
        "key_padding": draw(st.none() | st.builds(lambda p: bool_mask(batch, seqlen_k, keep=p), st.floats(0, 1))),
    }
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    sizes = (batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, draw(st.integers(1, 40)))
    return random_call(*sizes, dtype=torch.float16, seed=draw(st.integers(0, 99)), **terms)


@settings(max_examples=10, deadline=None)
@given(call=calls())
def test_any_call(call):
    check_backend(BACKEND, call)
