"""cpu.sdpa and cpu.tiled over the AttentionCall contract, beside the float64 reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnpatch import dispatch
from attnpatch.errors import NoBackend
from attnpatch.kernels.reference import attention_reference
from attnpatch.testing.inputs import check_backend, key_bounds, random_call
from attnpatch.testing.tolerance import assert_same_function

BACKENDS = ["cpu.sdpa", "cpu.tiled"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return dispatch.load_backend(request.param)


SIZES = {
    "square": {"seqlen_q": 64},
    "one": {"seqlen_q": 1, "seqlen_k": 1},
    "decode": {"seqlen_q": 1, "seqlen_k": 77},
    "append": {"seqlen_q": 5, "seqlen_k": 33},
    "cross_longer_q": {"seqlen_q": 33, "seqlen_k": 7},
    "many_tiles": {"seqlen_q": 260, "seqlen_k": 1040, "head_dim": 8, "num_heads": 2, "num_kv_heads": 1},
    "mha": {"num_heads": 3, "num_kv_heads": 3},
    "mqa": {"num_heads": 6, "num_kv_heads": 1, "batch": 2},
    "odd_groups": {"num_heads": 15, "num_kv_heads": 5, "seqlen_q": 9},
    "odd_head_dim": {"head_dim": 20, "head_dim_v": 13, "seqlen_q": 67},
    "head_dim_1": {"head_dim": 1, "head_dim_v": 3, "seqlen_q": 5},
    "wide_values": {"head_dim": 16, "head_dim_v": 48, "seqlen_q": 17},
    "no_batch": {"batch": 0, "seqlen_q": 4},
    "no_rows": {"seqlen_q": 0, "seqlen_k": 4},
    "no_keys": {"seqlen_q": 4, "seqlen_k": 0},
}

TERMS = {
    "full": {},
    "causal": {"window_right": 0},
    "causal_offset": {"window_right": 0, "q_offset": 3},
    "causal_before_the_keys": {"window_right": 0, "q_offset": -2},
    "window": {"window_left": 2, "window_right": 0},
    "both_sides": {"window_left": 3, "window_right": 1},
    "future_only": {"window_left": 0},
    "empty_band": {"window_left": -2, "window_right": 0},
    "offset_tensor": {"window_right": 0, "q_offset": torch.tensor(2)},
    "offset_int32": {"window_right": 0, "window_left": 4, "q_offset": torch.tensor(2, dtype=torch.int32)},
    "scale": {"sm_scale": 0.3},
}


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes_and_terms(backend, sizes, terms):
    check_backend(backend, random_call(**sizes, **terms))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_dtypes(backend, dtype, terms):
    check_backend(backend, random_call(batch=2, seqlen_q=11, seqlen_k=19, head_dim=32, dtype=dtype, **terms))


def padding(batch, seqlen_k, kind):
    mask = torch.ones(batch, seqlen_k, dtype=torch.bool)
    if kind == "left":
        mask[0, : seqlen_k // 3] = False
    elif kind == "right":
        mask[-1, seqlen_k // 2 :] = False
    elif kind == "holes":
        mask[:, 1::3] = False
    elif kind == "nothing":
        mask[0] = False
    return mask


@pytest.mark.parametrize("kind", ["none", "left", "right", "holes", "nothing"])
@pytest.mark.parametrize("seqlen_q", [1, 6, 30], ids=["decode", "append", "prefill"])
@pytest.mark.parametrize("terms", [{}, TERMS["causal"], TERMS["window"]], ids=["full", "causal", "window"])
def test_padding(backend, kind, seqlen_q, terms):
    offset = 30 - seqlen_q
    call = random_call(
        batch=2, seqlen_q=seqlen_q, seqlen_k=30, key_padding=padding(2, 30, kind), q_offset=offset, **terms
    )
    check_backend(backend, call)


MASKS = {
    "bool": lambda: torch.rand(2, 4, 9, 13) > 0.4,
    "bool_per_batch": lambda: torch.rand(2, 1, 9, 13) > 0.4,
    "bool_row": lambda: torch.rand(1, 1, 1, 13) > 0.4,
    "bool_hides_rows": lambda: (torch.rand(2, 4, 9, 1) > 0.4).expand(2, 4, 9, 13),
    "bias": lambda: torch.randn(1, 4, 9, 13),
    "bias_per_column": lambda: torch.randn(1, 4, 1, 13),
    "bias_one_value": lambda: torch.full((1, 1, 1, 1), 3.0),
    "inf": lambda: torch.zeros(2, 1, 9, 13).masked_fill(torch.rand(2, 1, 9, 13) > 0.5, -torch.inf),
    "min": lambda: torch.randn(2, 1, 9, 13).masked_fill(torch.rand(2, 1, 9, 13) > 0.5, torch.finfo(torch.float32).min),
    "minus_1e9": lambda: torch.zeros(2, 1, 9, 13).masked_fill(torch.rand(2, 1, 9, 13) > 0.5, -1e9),
    "all_minus_10000": lambda: torch.full((1, 1, 9, 13), -10000.0),
    "all_excluded": lambda: torch.full((1, 1, 9, 13), -torch.inf),
    "float64": lambda: torch.randn(1, 4, 9, 13, dtype=torch.float64),
}


@pytest.mark.parametrize("terms", [{}, TERMS["causal_offset"]], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make_mask", MASKS.values(), ids=MASKS)
def test_masks(backend, make_mask, dtype, terms):
    check_backend(backend, random_call(batch=2, seqlen_q=9, seqlen_k=13, dtype=dtype, attn_mask=make_mask(), **terms))


def test_bias_is_not_rounded_to_half_precision(backend):
    """A float32 bias next to bfloat16 scores: -1000 and -999 are one number in bfloat16."""
    call = random_call(seqlen_q=7, seqlen_k=9, dtype=torch.bfloat16)
    call = call._replace(attn_mask=(-1000 - torch.rand(1, 1, 7, 9)).expand(1, 4, 7, 9))
    k, v = (x.repeat_interleave(2, dim=1) for x in (call.k, call.v))
    scores = (call.q @ k.transpose(-1, -2) * call.sm_scale).float() + call.attn_mask
    original = scores.softmax(-1).to(torch.bfloat16) @ v
    assert_same_function(backend.run(call), original, attention_reference(call))


@pytest.mark.parametrize("terms", [{}, TERMS["causal"], {"key_padding": padding(1, 12, "left")}], ids=str)
def test_softcap(terms):
    call = random_call(seqlen_q=12, softcap=3.0, sm_scale=2.0, **terms)
    check_backend(dispatch.load_backend("cpu.tiled"), call)


REFUSED_BY_SDPA = {
    "sinks": ({"sinks": torch.zeros(4)}, "sinks have no place"),
    "alibi_slopes": ({"alibi_slopes": torch.zeros(4)}, "alibi_slopes have no place"),
    "lse": ({"lse": True}, "does not return the lse"),
    "softcap": ({"softcap": 3.0}, "softcap 3.0 has no place"),
    "negative_scale": ({"sm_scale": -0.3, "window_right": 0}, "sm_scale -0.3 is not positive"),
    "zero_scale": ({"sm_scale": 0.0, "window_right": 0}, "sm_scale 0.0 is not positive"),
}


@pytest.mark.parametrize(("terms", "reason"), REFUSED_BY_SDPA.values(), ids=REFUSED_BY_SDPA)
def test_sdpa_refuses_with_a_sentence(terms, reason):
    call = random_call(seqlen_q=9, **terms)
    assert reason in dispatch.load_backend("cpu.sdpa").refuses(call)
    check_backend(dispatch.load_backend("cpu.tiled"), call)


OFFSETS = {
    "per_sequence": ({"seqlen_q": 4}, torch.tensor([3, 9])),
    "per_sequence_decode": ({"seqlen_q": 1}, torch.tensor([3, 9])),
    "scalar_decode": ({"seqlen_q": 1}, torch.tensor(5)),
    "first_key": ({"seqlen_q": 1}, torch.tensor(0)),
    "past_the_end": ({"seqlen_q": 2}, torch.tensor(50)),
    "one_of_one": ({"seqlen_q": 4}, torch.tensor([6])),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("window", [None, 3], ids=["causal", "window"])
@pytest.mark.parametrize(("sizes", "offset"), OFFSETS.values(), ids=OFFSETS)
def test_offset_tensors(backend, sizes, offset, window, dtype):
    call = random_call(batch=2, seqlen_k=20, window_right=0, window_left=window, q_offset=offset.to(dtype), **sizes)
    check_backend(backend, call)


POISON = {
    "offset": {"window_right": 0, "q_offset": 7},
    "offset_tensor": {"window_right": 0, "q_offset": torch.tensor(7)},
    "offset_per_sequence": {"window_right": 0, "q_offset": torch.tensor([7, 7])},
    "padding": {"key_padding": torch.arange(40)[None].expand(2, 40) < 8},
    "causal_and_padding": {"window_right": 0, "q_offset": 30, "key_padding": torch.arange(40)[None].expand(2, 40) < 8},
}


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 3], ids=["decode", "append"])
@pytest.mark.parametrize("terms", POISON.values(), ids=POISON)
def test_unwritten_tail_of_a_cache_is_not_read(backend, terms, seqlen_q, poison):
    """pytorch#101967: 0 * NaN is NaN; only the first 8 to 10 of 40 keys have been written."""
    call = random_call(batch=2, seqlen_q=seqlen_q, seqlen_k=40, **terms)
    call.k[:, :, 10:], call.v[:, :, 10:] = poison, poison
    check_backend(backend, call)


def test_rows_without_a_key_beside_poison(backend):
    call = random_call(batch=2, seqlen_q=1, seqlen_k=12, key_padding=torch.zeros(2, 12, dtype=torch.bool))
    call.k.fill_(torch.nan)
    call.v.fill_(torch.nan)
    assert (backend.run(call) == 0).all()


def test_operands_are_not_written(backend):
    call = random_call(batch=2, seqlen_q=5, seqlen_k=9, key_padding=padding(2, 9, "holes"), window_right=0)
    call = call._replace(attn_mask=torch.randn(2, 1, 5, 9).expand(2, 4, 5, 9))
    before = [x.clone() for x in call if isinstance(x, torch.Tensor)]
    backend.run(call)
    for x, y in zip((x for x in call if isinstance(x, torch.Tensor)), before, strict=True):
        assert torch.equal(x, y)


STRIDES = {
    "contiguous": lambda x: x.contiguous(),
    "sliced": lambda x: torch.stack([x, x], -1)[..., 0],
    "every_second_row": lambda x: torch.stack([x, x], 3).flatten(2, 3)[:, :, ::2],
    "expanded_batch": lambda x: x[:1].expand_as(x),
    "expanded_heads": lambda x: x[:, :1].expand_as(x),
    "expanded_keys": lambda x: x[:, :, :1].expand_as(x),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize("terms", [{}, TERMS["causal_offset"]], ids=["full", "causal"])
@pytest.mark.parametrize("seqlen_q", [1, 33], ids=["decode", "prefill"])
@pytest.mark.parametrize("stride", STRIDES.values(), ids=STRIDES)
def test_strides(backend, stride, seqlen_q, terms):
    call = random_call(batch=2, seqlen_q=seqlen_q, seqlen_k=33, **terms)
    check_backend(backend, call._replace(q=stride(call.q), k=stride(call.k), v=stride(call.v)))


EXTREMES = {"large": 60.0, "larger": 3000.0, "tiny": 1e-20, "zero": 0.0}


@pytest.mark.parametrize("factor", EXTREMES.values(), ids=EXTREMES)
def test_extreme_scores(backend, factor):
    call = random_call(batch=2, seqlen_q=9, window_right=0)
    check_backend(backend, call._replace(q=call.q * factor))


def test_float16_scores_that_overflow_before_the_scale():
    """pytorch#119131: max |q| 576, max |k| 383 give a dot of 784,449; the scale brings it back."""
    call = random_call(seqlen_q=4, head_dim=64, dtype=torch.float16, num_heads=1, num_kv_heads=1)
    call = call._replace(q=call.q * 150, k=call.k * 100)
    o = dispatch.load_backend("cpu.tiled").run(call)
    torch.testing.assert_close(o, attention_reference(call).to(torch.float16))


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation allocated."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return result


BOUNDED = {
    "full": {},
    "causal": {"window_right": 0},
    "causal_offset_tensor": {"window_right": 0, "q_offset": torch.tensor(0)},
    "window": {"window_right": 0, "window_left": 64},
    "padding": {"key_padding": torch.arange(2048)[None] > 5, "window_right": 0},
    "bool_mask": {"attn_mask": (torch.rand(1, 1, 1, 2048) > 0.2)},
}


@pytest.mark.parametrize("terms", BOUNDED.values(), ids=BOUNDED)
def test_nothing_quadratic_is_allocated(backend, terms):
    """2,048 x 2,048 scores would be 4.2 M elements; a tile of 256 rows is 0.5 M."""
    call = random_call(seqlen_q=2048, num_heads=1, num_kv_heads=1, head_dim=8, **terms)
    with LargestTensor() as largest:
        backend.run(call)
    assert 0 < largest.numel <= 256 * 2048


def test_a_mask_of_ones_costs_nothing(backend):
    """Bounds that hide nothing leave one call of SDPA, and one loop without a mask."""
    call = random_call(seqlen_q=2048, num_heads=1, num_kv_heads=1, head_dim=8, key_bounds=key_bounds(0, 2048))
    call = call._replace(attn_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, 2048, 2048))
    plain = call._replace(attn_mask=None, key_bounds=None)
    with LargestTensor() as masked:
        backend.run(call)
    with LargestTensor() as unmasked:
        backend.run(plain)
    assert masked.numel == unmasked.numel


def test_the_watch_sees_a_quadratic_tensor():
    call = random_call(seqlen_q=2048, num_heads=1, num_kv_heads=1, head_dim=8)
    with LargestTensor() as largest:
        attention_reference(call, torch.float32)
    assert largest.numel >= 2048 * 2048


def test_a_banded_call_works_on_the_band_only(backend):
    """A window of 64 over 2,048 keys: tiles are as wide as the window and the rows, not as the keys."""
    call = random_call(seqlen_q=2048, num_heads=2, num_kv_heads=1, head_dim=8, window_right=0, window_left=63)
    with LargestTensor() as largest:
        backend.run(call)
    assert largest.numel <= 2 * 256 * (256 + 64)


def test_decode_reads_the_valid_part_of_a_cache_only(backend):
    call = random_call(seqlen_q=1, seqlen_k=8192, head_dim=8, window_right=0, q_offset=torch.tensor(20))
    with LargestTensor() as largest:
        backend.run(call)
    assert largest.numel < 8192


@settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), name=st.sampled_from(BACKENDS))
def test_any_call(data, name):
    """Random shapes and terms together."""
    draw = data.draw
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    seqlen_q, seqlen_k = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    terms = {}
    if draw(st.booleans()):
        terms["window_right"] = draw(st.integers(-2, 4))
    if draw(st.booleans()):
        terms["window_left"] = draw(st.integers(-1, 6))
    offset = draw(st.one_of(st.integers(-3, 8), st.lists(st.integers(-3, 8), min_size=batch, max_size=batch)))
    terms["q_offset"] = torch.tensor(offset) if isinstance(offset, list) else offset
    if draw(st.booleans()):
        terms["key_padding"] = torch.rand(batch, seqlen_k) > 0.3
    mask = draw(st.sampled_from(["none", "bool", "bias", "inf"]))
    if mask != "none":
        shape = tuple(draw(st.sampled_from([1, n])) for n in (batch, kv_heads * group, seqlen_q, seqlen_k))
        bias = torch.randn(shape)
        hidden = torch.rand(shape) > 0.7
        terms["attn_mask"] = {"bool": ~hidden, "bias": bias, "inf": bias.masked_fill(hidden, -torch.inf)}[mask]
    if draw(st.booleans()):
        shape = tuple(draw(st.sampled_from([1, n])) for n in (batch, kv_heads * group, seqlen_q))
        first, stop = torch.randint(-1, 6, shape), torch.randint(0, seqlen_k + 3, shape)
        terms["key_bounds"] = key_bounds(first, stop, 0)
    if name == "cpu.tiled":
        others = {
            "softcap": 2.0,
            "sinks": torch.randn(kv_heads * group),
            "alibi_slopes": torch.rand(batch, kv_heads * group),
            "lse": True,
        }
        terms |= {term: x for term, x in others.items() if draw(st.booleans())}
    call = random_call(
        batch=batch,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=draw(st.sampled_from([4, 7])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 99)),
        **terms,
    )
    check_backend(dispatch.load_backend(name), call)


PHASES = {
    "decode": ({"seqlen_q": 1, "seqlen_k": 9}, "decode"),
    "decode_of_one": ({"seqlen_q": 1, "seqlen_k": 1}, "decode"),
    "append": ({"seqlen_q": 4, "seqlen_k": 9, "window_right": 0}, "append"),
    "append_64": ({"seqlen_q": 64, "seqlen_k": 90, "window_right": 0}, "append"),
    "chunk_65": ({"seqlen_q": 65, "seqlen_k": 90, "window_right": 0}, "prefill"),
    "prefill": ({"seqlen_q": 12, "window_right": 0}, "prefill"),
    "bidirectional": ({"seqlen_q": 12}, "prefill"),
    "cross": ({"seqlen_q": 12, "seqlen_k": 30}, "cross"),
    "cross_padding": ({"seqlen_q": 12, "seqlen_k": 30, "key_bounds": key_bounds(0, 20)}, "cross"),
    "bounds_per_row": ({"seqlen_q": 12, "seqlen_k": 30, "key_bounds": key_bounds(0, torch.arange(12))}, "append"),
}


@pytest.mark.parametrize(("sizes", "phase"), PHASES.values(), ids=PHASES)
def test_phase(sizes, phase):
    assert random_call(**sizes).phase == phase


def test_choice_falls_through_refusals_and_says_so():
    _, chosen = dispatch.choose(random_call(softcap=2.0, seqlen_q=4))
    assert (chosen.backend, chosen.phase) == ("cpu.tiled", "prefill")
    assert chosen.reason.startswith("cpu.sdpa: softcap 2.0")


def test_first_choice():
    _, chosen = dispatch.choose(random_call(seqlen_q=1, seqlen_k=5))
    assert (chosen.backend, chosen.phase, chosen.reason) == ("cpu.sdpa", "decode", "first choice")


def test_named_order_is_kept():
    _, chosen = dispatch.choose(random_call(), ("cpu.tiled", "cpu.sdpa"))
    assert chosen.backend == "cpu.tiled"


def test_named_backend_never_falls_back():
    with pytest.raises(NoBackend, match=r"cpu\.sdpa: softcap 2\.0 has no place"):
        dispatch.choose(random_call(softcap=2.0), ("cpu.sdpa",))


def test_backend_of_another_device():
    with pytest.raises(NoBackend, match=r"sdpa\.blocked: runs on cuda, not cpu"):
        dispatch.choose(random_call(), ("sdpa.blocked",))


def test_unknown_name():
    with pytest.raises(ValueError, match=r"unknown backend 'cpu\.fast'; the backends are cpu\.sdpa"):
        dispatch.check_names(["cpu.fast"])


def test_recordings_nest():
    call = random_call(seqlen_q=4)
    with dispatch.recording() as outer:
        dispatch.run(call)
        with dispatch.recording() as inner:
            dispatch.run(call, ("cpu.tiled",))
        dispatch.run(call)
    assert [d.backend for d in outer.dispatches] == ["cpu.sdpa", "cpu.sdpa"]
    assert [d.backend for d in inner.dispatches] == ["cpu.tiled"]
