"""Packed sequences in the interpreter: steps, chunks and prompts in one call, against each by itself in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch.attention_call import bottom_right_offset
from attnpatch.kernels.decode import configs
from attnpatch.kernels.decode.launch import decode
from attnpatch.testing.inputs import packed, paged, random_call
from tests.combinations import in_turn
from tests.kernels.calls import check

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero):RuntimeWarning")  # numpy's, not a kernel's

MIXES = {
    "steps": [(1, 100), (1, 1), (1, 64), (1, 65)],
    "a step and a prompt": [(1, 70), (20, 20)],
    "a chunk of a prompt": [(9, 130), (1, 5)],
    "empty sequences": [(0, 50), (1, 70), (0, 0), (3, 3), (2, 0), (0, 1)],
    "none": [(0, 0), (0, 70)],
    "one": [(7, 100)],
    "more rows than keys": [(9, 3), (1, 70)],
    "nine": [(1, n) for n in (3, 200, 1, 64, 9, 90, 33, 128, 2)],
}


def mixed(mix, spare=0, **case):
    """Sequences of (rows, keys), the last row on the last key unless the case has an offset of its own."""
    defaults = {"batch": 1, "num_heads": 3, "num_kv_heads": 1, "head_dim": 16, "dtype": torch.float16, "lse": True}
    parts = [{"seqlen_q": q, "seqlen_k": k, "q_offset": k - q, "window_right": 0} for q, k in mix]
    return packed([random_call(**{**defaults, **part, **case}, seed=i) for i, part in enumerate(parts)], spare)


@pytest.mark.parametrize("multiprocessors", [1, 7])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_mixes(chip, mix, multiprocessors):
    chip(multiprocessors)
    call = mixed(mix)
    assert torch.equal(bottom_right_offset(call.cu_seqlens_q, call.cu_seqlens_k.diff()), call.q_offset)
    check(call)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7])
def test_forced_splits(num_splits):
    check(mixed(MIXES["a chunk of a prompt"]), num_splits)


@pytest.mark.parametrize("mix", ["steps", "empty sequences", "more rows than keys"])
def test_rows_of_no_sequence(chip, mix):
    """A bucket's padding: zeros, -inf as its lse; and keys of no sequence are NaN."""
    chip(7)
    call = mixed(MIXES[mix], spare=5)
    o = check(call)
    assert not o[:, :, -5:].any()
    assert (call.lse[:, :, -5:] == -math.inf).all()


TERMS = {
    "a window": {"window_left": 30},
    "a window of one key": {"window_left": 0},
    "no band": {"window_right": None},
    "both sides": {"window_left": 20, "window_right": 40},
    "sinks": {"sinks": torch.tensor([-1.0, 2.0, 30.0])},
    "slopes": {"alibi_slopes": torch.tensor([0.1, 0.0, 1.0])},
    "slopes per sequence": {"alibi_slopes": torch.tensor([[0.1, 0.0, 1.0]])},
    "softcap": {"softcap": 2.0},
    "one offset": {"q_offset": 3},
    "rows that see nothing": {"q_offset": -2},
}


@pytest.mark.parametrize(("terms", "num_splits"), in_turn(TERMS, [1, 2]))
def test_terms(terms, num_splits):
    check(mixed([(4, 80), (0, 9), (1, 66)], **terms), num_splits)


def test_one_offset_for_all():
    """A number, or a tensor of one element."""
    call = mixed([(4, 80), (1, 66)], q_offset=3)
    for offset in (3, torch.tensor(3)):
        assert torch.equal(check(call._replace(q_offset=offset)), decode(call))


@pytest.mark.parametrize(("kv_heads", "group", "rows"), [(2, 1, 17), (2, 5, 4), (1, 7, 5), (1, 16, 2), (1, 20, 2)])
def test_groups(kv_heads, group, rows):
    check(mixed([(1, 66), (rows, 70)], num_heads=kv_heads * group, num_kv_heads=kv_heads), 2)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_pages(chip, page_size):
    chip(7)
    check(paged(mixed([(1, 100), (0, 3), (6, 70), (3, 3), (1, 64)], spare=2), page_size))


def test_pages_of_sequences_without_a_key():
    call = paged(mixed([(1, 1), (3, 0), (0, 0)]), 16)
    assert (call.block_table[1:] < 0).any() or (call.block_table[1:] >= call.k.shape[0]).any()
    check(call)


def test_strided_projection():
    """q, k and v are views of one ``[total, heads, head_dim]`` projection."""
    call = mixed([(9, 9), (1, 1), (7, 7)])
    fused = torch.randn(1, 17, 5, 16).half().transpose(1, 2)
    q, k, v = fused.split([3, 1, 1], dim=1)
    check(call._replace(q=q, k=k, v=v))


def bits(call):
    lse = torch.full(call.q.shape[:3], -math.inf)
    return torch.cat([decode(call._replace(lse=lse)), lse[..., None]], dim=3)


def test_batch_invariant(chip, monkeypatch):
    """The same bits alone, among others, and with padding; without the option they do differ."""
    chip(1)
    monkeypatch.setattr(configs, "SPLIT_KEYS", 64)
    monkeypatch.setattr(configs, "INVARIANT_SPLIT_KEYS", 64)
    mix, same = [(2, 300), (1, 600)], {}
    for invariant in (False, True):
        case = {"batch_invariant": invariant, "dtype": torch.float32, "num_heads": 1}
        together = bits(mixed(mix, **case))
        alone = [bits(mixed(mix[:1], spare, **case))[:, :, :2] for spare in (0, 4)]
        same[invariant] = all(torch.equal(x, together[:, :, :2]) for x in alone)
    assert same == {False: False, True: True}


@st.composite
def mixes(draw):
    rows = st.sampled_from([0, 1, 1, 2, 7])
    mix = draw(st.lists(st.tuples(rows, st.integers(0, 150)), min_size=1, max_size=6))
    group = draw(st.integers(1, 4))
    terms = {
        "window_left": draw(st.none() | st.integers(0, 100)),
        "softcap": draw(st.none() | st.just(3.0)),
        "sinks": draw(st.none() | st.just(torch.linspace(-1, 3, group))),
        "alibi_slopes": draw(st.none() | st.just(torch.linspace(0, 1, group)[None])),
        "batch_invariant": draw(st.booleans()),
        "head_dim_v": draw(st.sampled_from([None, 24])),
    }
    call = mixed(mix, draw(st.sampled_from([0, 3])), num_heads=group, **terms)
    page_size = draw(st.sampled_from([0, 1, 16]))
    return (paged(call, page_size) if page_size else call), draw(st.integers(0, 5))


@settings(max_examples=6, deadline=None)
@given(case=mixes())
def test_any_mix(case):
    check(*case)
