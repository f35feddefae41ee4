"""triton.append in the interpreter: several query rows per sequence, in tiles that cut groups, against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch.dispatch import load_backend
from attnpatch.kernels.decode import configs
from attnpatch.kernels.decode.launch import decode
from attnpatch.testing.inputs import check_backend, key_bounds, random_call
from tests.combinations import in_turn
from tests.kernels.calls import bias, bool_mask, check, poison

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero):RuntimeWarning")  # numpy's, not a kernel's

BACKEND = load_backend("triton.append")
KEYS = 130
ROWS = 6
ROW = torch.arange(ROWS)
CAUSAL = {"window_right": 0, "q_offset": KEYS - ROWS}


def append(**case):
    """float16 unless the row says otherwise: bfloat16 products are wrong in the interpreter."""
    sizes = {"batch": 2, "num_heads": 3, "num_kv_heads": 1, "seqlen_q": ROWS, "seqlen_k": KEYS, "head_dim": 16}
    return random_call(**{**sizes, "dtype": torch.float16, "lse": True, **case})


@pytest.mark.parametrize(("rows", "group"), [(2, 1), (17, 1), (9, 2), (6, 3), (4, 5), (5, 7), (3, 8), (2, 16), (2, 20)])
def test_rows_and_groups(rows, group):
    """Whole tiles, tiles that cut a query's group, and a last one that is not full."""
    terms = {"q_offset": KEYS - rows, "window_right": 0, "window_left": 90}
    check(append(batch=1, num_heads=group, seqlen_q=rows, **terms), 2)


@pytest.mark.parametrize("rows", [16, 33, 64])
def test_many_rows(rows):
    check(append(batch=1, seqlen_q=rows, window_right=0, q_offset=KEYS - rows), 1)


@pytest.mark.parametrize("num_splits", [1, 2, 4, 5, 6, 7])
@pytest.mark.parametrize("seqlen_k", [65, 300])
def test_lengths(seqlen_k, num_splits):
    check(
        append(batch=1, num_heads=1, seqlen_q=3, seqlen_k=seqlen_k, window_right=0, q_offset=seqlen_k - 3), num_splits
    )


@pytest.mark.parametrize("config", [(64, 64), (128, 32)], ids=str)
def test_tiles(config):
    """Tiles of 64 rows and more, as the shipped configurations have, of rows that see and rows that do not."""
    config = configs.DecodeConfig(*config, num_warps=4, num_stages=1)
    check(append(seqlen_q=23, window_right=0, window_left=50, q_offset=torch.tensor([-20, 100])), 2, config)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 40), (40, 16), (80, 96), (192, 128)])
def test_head_dims(head_dim, head_dim_v):
    check(append(batch=1, head_dim=head_dim, head_dim_v=head_dim_v, **CAUSAL), 2)


def test_float32():
    check(append(dtype=torch.float32, head_dim=64, **CAUSAL), 2)


BANDS = {
    "no band": {},
    "bottom-right": {"q_offset": KEYS - ROWS, "window_right": 0},
    "cache with room": {"q_offset": torch.tensor(60), "window_right": 0},
    "the first rows of all": {"q_offset": 0, "window_right": 0},
    "the first rows see nothing": {"q_offset": -3, "window_right": 0},
    "no row sees a key": {"q_offset": -ROWS, "window_right": 0},
    "the last rows see nothing": {"q_offset": KEYS + 27, "window_right": 0, "window_left": 30},
    "past the keys": {"q_offset": 500, "window_right": 0, "window_left": 30},
    "a window of one key": {"q_offset": 62, "window_right": 0, "window_left": 0},
    "a window narrower than the rows": {"q_offset": 100, "window_right": 0, "window_left": 2},
    "left side only": {"q_offset": 62, "window_left": 3},
    "both sides": {"q_offset": 62, "window_left": 3, "window_right": 70},
    "one each": {"q_offset": torch.tensor([3, 125], dtype=torch.int32), "window_right": 0},
    "one each, one empty": {"q_offset": torch.tensor([-9, 100]), "window_right": 0},
    "one each, one half empty": {"q_offset": torch.tensor([125, -2]), "window_right": 0, "window_left": 60},
    "one each, expanded": {"q_offset": torch.tensor([70]).expand(2), "window_right": 0},
    "one each, every second": {"q_offset": torch.tensor([70, 0, 9, 0])[::2], "window_right": 0},
}


@pytest.mark.parametrize("num_splits", [0, 1])
@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_bands(chip, band, num_splits):
    """Split as the plan for seven multiprocessors says, or not at all."""
    chip(7)
    check(append(**band), num_splits)


MASKS = {
    "bool, per row": {"attn_mask": bool_mask(1, 1, ROWS, KEYS)},
    "bool, per head": {"attn_mask": bool_mask(2, 3, ROWS, KEYS)},
    "bool, one row without a key": {"attn_mask": (ROW > 0)[:, None] & bool_mask(1, 1, ROWS, KEYS)},
    "bias": {"attn_mask": bias(1, 3, ROWS, KEYS)},
    "bias, every second": {"attn_mask": bias(1, 1, ROWS, 2 * KEYS)[..., ::2]},
    "-inf": {"attn_mask": bias(2, 1, ROWS, KEYS, hide=0.5)},
    "float16 minimum": {"attn_mask": bias(1, 1, ROWS, KEYS, dtype=torch.float16, hide=0.3, constant=-65504.0)},
    "bfloat16 -1e9": {"attn_mask": bias(1, 1, ROWS, KEYS, dtype=torch.bfloat16, hide=0.3, constant=-1e9)},
    "-100 is a bias": {"attn_mask": bias(1, 1, ROWS, KEYS, hide=0.9, constant=-100.0)},
    "padding on the left": {"key_padding": torch.arange(KEYS) >= torch.tensor([[0], [93]])},
    "padding with holes": {"key_padding": bool_mask(2, KEYS, keep=0.3)},
    "a sequence without a key": {"key_padding": torch.tensor([[True], [False]]).expand(2, KEYS)},
    "plain bounds": {"key_bounds": key_bounds(ROW * 20, ROW * 20 + 40)},
    "bounds per head": {"key_bounds": key_bounds(torch.arange(3)[:, None] * 9, KEYS - ROW)},
    "bounds of rows that see nothing": {"key_bounds": key_bounds(ROW * 30, torch.tensor([99, 20, 99, 3, 99, 200]))},
    "bounds beyond both ends": {"key_bounds": key_bounds(-70, 3 * KEYS)},
    "bounds and a mask": {"key_bounds": key_bounds(ROW, 99 + ROW, 0), "attn_mask": bool_mask(2, 1, ROWS, KEYS)},
    "bounds, some plain": {
        "key_bounds": key_bounds(ROW * 10, 99, ROW != 2),
        "attn_mask": bool_mask(1, 1, ROWS, KEYS) | (ROW != 2)[:, None],
    },
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_masks(masks):
    check(append(**masks), 2)


@pytest.mark.parametrize("masks", ["bias", "padding with holes", "bounds and a mask", "bounds per head"])
def test_masks_in_a_band(masks):
    check(append(window_right=0, window_left=70, q_offset=torch.tensor([40, 125]), **MASKS[masks]), 2)


MORE_TERMS = {
    "sinks": {"sinks": torch.linspace(-2, 300, 3)},
    "slopes": {"alibi_slopes": torch.linspace(-0.1, 1, 6).view(2, 3)},
    "softcap": {"softcap": 2.0},
    "large scores": {"sm_scale": 300.0},
    "all": {"sinks": torch.linspace(-2, 2, 3), "alibi_slopes": torch.linspace(0, 1, 3), "softcap": 3.0},
}


@pytest.mark.parametrize(("terms", "num_splits"), in_turn(MORE_TERMS, [2, 1]))
def test_terms(terms, num_splits):
    check(append(seqlen_q=4, window_right=0, q_offset=torch.tensor([-2, 125]), **terms), num_splits)


def test_every_term_at_once(chip):
    chip(7)
    for masks in ("-inf", "padding with holes", "bounds and a mask"):
        band = {"window_left": 90, "window_right": 0, "q_offset": torch.tensor([120, 50])}
        check(append(**MASKS[masks], **MORE_TERMS["all"], **band))


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_poisoned_cache(num_splits):
    """NaN past each sequence's last row and left of the first row's window."""
    keys, offsets = torch.arange(KEYS), torch.tensor([[100], [7]])
    call = append(q_offset=offsets[:, 0], window_left=40, window_right=0)
    check(poison(call, (keys > offsets + ROWS - 1) | (keys < offsets - 40)), num_splits)


def test_poison_behind_masks():
    dead = ~bool_mask(2, KEYS)
    check(poison(append(key_padding=~dead), dead), 2)
    check(poison(append(attn_mask=~dead[:, None, None]), dead), 2)
    check(poison(append(attn_mask=torch.zeros(1).masked_fill(dead[:, None, None], -math.inf)), dead), 2)


def test_no_keys():
    call = append(seqlen_k=0, sinks=torch.zeros(3), window_right=0)
    assert not check_backend(BACKEND._replace(refuses=lambda call: None), call).any()


LAYOUTS = {
    "heads outside": lambda c: c._replace(q=c.q.contiguous(), k=c.k.contiguous(), v=c.v.contiguous()),
    "k transposed": lambda c: c._replace(k=c.k.transpose(2, 3).contiguous().transpose(2, 3)),
    "sliced out of a fused projection": lambda c: c._replace(
        q=torch.randn(2, ROWS, 3, 48).half().transpose(1, 2)[..., 16:32]
    ),
    "every second channel": lambda c: c._replace(v=torch.randn(2, 1, KEYS, 32).half()[..., ::2]),
    "one sequence for all": lambda c: c._replace(k=c.k[:1].expand(2, 1, KEYS, 16)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout):
    check(layout(append(**CAUSAL)), 2)


def test_sequences_of_different_lengths(chip):
    """A share of the keys is a split: the long sequence gets most programs, the short ones one each."""
    chip(2)
    offsets = torch.tensor([0, 390, -9, 5, 64, 63, 59, 130, 1])
    call = append(batch=9, seqlen_q=2, seqlen_k=400, num_heads=1, q_offset=offsets, window_right=0)
    check(call)
    check(call._replace(window_left=300))


def bits(call):
    call = call._replace(lse=torch.full(call.q.shape[:3], math.nan))
    return decode(call), call.lse


def alone(call, b, capacity=None):
    one = slice(b, b + 1)
    k, v = (x[one, :, :capacity] for x in (call.k, call.v))
    return call._replace(q=call.q[one], k=k, v=v, q_offset=call.q_offset[one], lse=None)


@pytest.mark.parametrize("rows", [1, 3])
def test_batch_invariant(chip, monkeypatch, rows):
    """The same bits whatever the neighbours and the capacity; without the option they do differ."""
    chip(7)
    monkeypatch.setattr(configs, "INVARIANT_SPLIT_KEYS", 128)
    offsets = torch.tensor([290, 127])
    call = append(num_heads=1, seqlen_q=rows, seqlen_k=600, dtype=torch.float32, q_offset=offsets, window_right=0)
    same = {}
    for invariant in (False, True):
        call = call._replace(batch_invariant=invariant)
        together = bits(call)
        pairs = [(bits(alone(call, b, capacity)), b) for b in range(2) for capacity in (300, 600)]
        same[invariant] = all(
            torch.equal(x, y[b : b + 1]) for one, b in pairs for x, y in zip(one, together, strict=True)
        )
    assert same == {False: False, True: True}
    check(call)


REFUSALS = {
    "65 query rows; triton.append takes up to 64": {"seqlen_q": 65},
    "K is not longer than q": {"seqlen_k": ROWS},
    "float64 is not one of float16, bfloat16, float32": {"dtype": torch.float64},
    "head_dim 320 is above 256, the widest tile of triton.append": {"head_dim_v": 320},
}


@pytest.mark.parametrize(("sentence", "case"), REFUSALS.items(), ids=REFUSALS)
def test_refusals(sentence, case):
    assert BACKEND.refuses(append(**case)) == sentence


@st.composite
def calls(draw):
    batch, num_kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    rows, keys = draw(st.integers(2, 9)), draw(st.integers(10, 200))
    num_heads = num_kv_heads * group
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    side = st.none() | st.integers(0, 150)
    offset = st.integers(-rows - 2, keys + 5)
    offsets = st.lists(offset, min_size=batch, max_size=batch).map(torch.tensor)
    mask_shape = (*(draw(st.sampled_from([1, n])) for n in (batch, num_heads, rows)), keys)
    terms = {
        "q_offset": draw(offset | offset.map(torch.tensor) | offsets),
        "window_left": draw(side),
        "window_right": draw(side | st.just(0)),
        "softcap": draw(st.none() | st.just(3.0)),
        "attn_mask": draw(st.none() | st.sampled_from([bool_mask(*mask_shape), bias(*mask_shape, hide=0.3)])),
        "key_padding": draw(st.none() | st.just(bool_mask(batch, keys))),
        "sinks": draw(st.none() | st.just(torch.randn(num_heads, generator=generator))),
        "alibi_slopes": draw(st.none() | st.just(torch.rand(batch, num_heads, generator=generator))),
        "batch_invariant": draw(st.booleans()),
    }
    sizes = {"batch": batch, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "seqlen_q": rows, "seqlen_k": keys}
    return append(**sizes, **terms), draw(st.integers(0, 7))


@settings(max_examples=6, deadline=None)
@given(case=calls())
def test_any_call(case):
    check(*case)
