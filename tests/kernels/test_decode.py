"""triton.decode in the interpreter: every term, every split count, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch.attention_call import AttentionCall
from attnpatch.dispatch import load_backend
from attnpatch.testing.inputs import random_call
from tests.combinations import in_turn
from tests.kernels.calls import bias, bool_mask, check, poison

BACKEND = load_backend("triton.decode")
SPLITS = [1, 3, 17]

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero):RuntimeWarning")  # numpy's, not a kernel's


def random_step(**case):
    """float16 unless the row says otherwise: bfloat16 products are wrong in the interpreter."""
    defaults = {"num_kv_heads": 1, "seqlen_q": 1, "seqlen_k": 130, "head_dim": 16, "dtype": torch.float16}
    return random_call(**{**defaults, **case})


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 16), (40, 40), (80, 80), (96, 96), (128, 128), (192, 128)])
def test_head_dims(head_dim, head_dim_v):
    check(random_step(head_dim=head_dim, head_dim_v=head_dim_v), 2)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (8, 2), (8, 1), (20, 1)], ids=str)
def test_groups(heads, num_splits):
    check(random_step(batch=2, num_heads=heads[0], num_kv_heads=heads[1]), num_splits)


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("seqlen_k", [1, 64, 65, 200])
def test_lengths(seqlen_k, num_splits):
    check(random_step(seqlen_k=seqlen_k), num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_float32(num_splits):
    check(random_step(dtype=torch.float32, num_heads=8, head_dim=64, seqlen_k=300), num_splits)


BANDS = {
    "cache with room": {"q_offset": 70, "window_right": 0},
    "first step": {"q_offset": 0, "window_right": 0},
    "no key": {"q_offset": -3, "window_right": 0},
    "past the keys": {"q_offset": 500, "window_right": 0, "window_left": 20},
    "partly past the keys": {"q_offset": 150, "window_right": 0, "window_left": 50},
    "window 1": {"q_offset": 100, "window_right": 0, "window_left": 0},
    "window 70": {"q_offset": 129, "window_right": 0, "window_left": 69},
    "left side only": {"q_offset": 100, "window_left": 20},
    "on the device": {"q_offset": torch.tensor(70), "window_right": 0},
    "one each": {"q_offset": torch.tensor([5, 129], dtype=torch.int32), "window_right": 0},
    "one each, one empty": {"q_offset": torch.tensor([-1, 100]), "window_right": 0},
    "one each, window": {"q_offset": torch.tensor([90, 129]), "window_right": 0, "window_left": 70},
}


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_bands(band, num_splits):
    check(random_step(batch=2, num_heads=2, **band), num_splits)


PADDINGS = {
    "left": torch.arange(130) >= torch.tensor([[0], [93]]),
    "right": torch.arange(130) < torch.tensor([[130], [3]]),
    "holes": bool_mask(2, 130, keep=0.5),
    "a sequence without a key": torch.tensor([[True], [False]]).expand(2, 130),
}


@pytest.mark.parametrize(("padding", "num_splits"), in_turn(PADDINGS, [1, 3]))
def test_padding(padding, num_splits):
    check(random_step(batch=2, key_padding=padding, q_offset=120, window_right=0), num_splits)


MASKS = {
    "bool, per head": bool_mask(2, 4, 1, 130),
    "bool, one for all": bool_mask(1, 1, 1, 130),
    "bool, one head without a key": torch.arange(4)[:, None, None] > bool_mask(1, 1, 1, 130).long(),
    "bias, per head": bias(1, 4, 1, 130),
    "bias, every second": bias(1, 1, 1, 260)[..., ::2],
    "float16 minimum": bias(1, 1, 1, 130, dtype=torch.float16, hide=0.3, constant=-65504.0),
    "bfloat16 -1e9": bias(1, 1, 1, 130, dtype=torch.bfloat16, hide=0.3, constant=-1e9),
    "-inf": bias(2, 1, 1, 130, hide=0.3),
    "-100 is a bias": bias(1, 1, 1, 130, hide=0.9, constant=-100.0),
}


@pytest.mark.parametrize(("mask", "num_splits"), in_turn(MASKS, [1, 3]))
def test_masks(mask, num_splits):
    check(random_step(batch=2, attn_mask=mask), num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_every_term_at_once(num_splits):
    call = random_step(
        batch=2,
        attn_mask=bias(1, 4, 1, 130, hide=0.2),
        key_padding=bool_mask(2, 130),
        q_offset=torch.tensor([120, 50]),
        window_left=90,
        window_right=0,
        softcap=5.0,
    )
    check(call, num_splits)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("sm_scale", [0.25, 3000.0], ids=["small", "large"])
def test_softcap(softcap, sm_scale):
    check(random_step(dtype=torch.float32, softcap=softcap, sm_scale=sm_scale), 2)


@pytest.mark.parametrize("num_splits", SPLITS)
def test_no_keys(num_splits):
    assert not check(random_step(seqlen_k=0), num_splits).any()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_poisoned_cache(num_splits):
    """NaN past the valid length and left of the window, in slots of padding, and behind a mask."""
    keys = torch.arange(130)
    offsets = torch.tensor([100, 7])
    cache = random_step(batch=2, q_offset=offsets, window_left=80, window_right=0)
    check(poison(cache, (keys > offsets[:, None]) | (keys < offsets[:, None] - 80)), num_splits)
    padding = PADDINGS["holes"]
    check(poison(random_step(batch=2, key_padding=padding), ~padding), num_splits)
    mask = bool_mask(2, 1, 1, 130)
    check(poison(random_step(batch=2, attn_mask=mask), ~mask[:, 0, 0]), num_splits)


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).half()


LAYOUTS = {
    "heads outside": lambda c: c._replace(q=c.q.contiguous(), k=c.k.contiguous(), v=c.v.contiguous()),
    "k transposed": lambda c: c._replace(k=c.k.transpose(2, 3).contiguous().transpose(2, 3)),
    "sliced out of a longer cache": lambda c: c._replace(k=noise(2, 2, 300, 16)[:, :, 100:230]),
    "sliced out of a fused projection": lambda c: c._replace(q=noise(2, 1, 4, 48).transpose(1, 2)[..., 16:32]),
    "every second channel": lambda c: c._replace(v=noise(2, 2, 130, 32)[..., ::2]),
    "one key head for all": lambda c: c._replace(k=c.k[:, :1].expand(2, 2, 130, 16)),
    "one sequence for all": lambda c: c._replace(v=c.v[:1].expand(2, 2, 130, 16)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout):
    check(layout(random_step(batch=2, num_kv_heads=2)), 2)


REFUSALS = {
    "2 query rows; triton.decode takes one": {"seqlen_q": 2},
    "float64 is not one of float16, bfloat16, float32": {"dtype": torch.float64},
    "head_dim 320 is above 256, the widest tile of triton.decode": {"head_dim": 320},
    "sm_scale -0.5 is not positive, so the largest product is not the largest score": {"sm_scale": -0.5},
}


@pytest.mark.parametrize(("sentence", "case"), REFUSALS.items(), ids=REFUSALS)
def test_refusals(sentence, case):
    assert BACKEND.refuses(random_step(**case)) == sentence


@st.composite
def steps(draw) -> tuple[AttentionCall, int]:
    batch, num_kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    seqlen_k = draw(st.integers(1, 200))
    side = st.none() | st.integers(0, 200)
    padding = st.builds(lambda keep: bool_mask(batch, seqlen_k, keep=keep), st.floats(0, 1))
    terms = {
        "q_offset": draw(st.integers(-20, 220)),
        "window_left": draw(side),
        "window_right": draw(side),
        "softcap": draw(st.none() | st.just(3.0)),
        "key_padding": draw(st.none() | padding),
    }
    sizes = (batch, num_kv_heads * draw(st.integers(1, 5)), num_kv_heads, 1, seqlen_k, draw(st.integers(1, 40)))
    return random_call(*sizes, dtype=torch.float16, seed=draw(st.integers(0, 99)), **terms), draw(st.integers(1, 9))


@settings(max_examples=10, deadline=None)
@given(step=steps())
def test_any_step(step):
    check(*step)
