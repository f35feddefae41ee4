"""triton.prefill_fp8: its reference, and its kernels in the interpreter and as Python on threads."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from attnpatch.dispatch import load_backend
from attnpatch.kernels.common import support
from attnpatch.kernels.prefill_hopper import fp8, launch
from attnpatch.kernels.reference import attention_fp8_reference, attention_lse_reference, hidden_keys
from attnpatch.testing.inputs import check_backend, key_bounds, random_call
from tests.kernels import gluon_on_threads

BACKEND = load_backend("triton.prefill_fp8")._replace(refuses=lambda call: None)
WIDTHS = (64, 128, 256)


def rounded(values, source, target, rounding, convert=interpreter._convert_float):
    """Triton's interpreter, but that a carry out of an 8 bit float's mantissa reaches its exponent."""
    if "fp8e4nv" not in str(target):
        return convert(values, source, target, rounding)
    assert values.dtype == np.float32
    return torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


class Kernel:
    """Stands in for the kernel."""

    def __getitem__(self, grid):
        return lambda **arguments: gluon_on_threads.run(grid, arguments)


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    """On a GPU of five multiprocessors, where all that is allocated holds NaN before."""
    for name in ("new_empty", "new_empty_strided"):
        allocate = getattr(torch.Tensor, name)

        def poisoned(x, *sizes, allocate=allocate, **options):
            y = allocate(x, *sizes, **options)
            return y.copy_(torch.full(y.shape, math.nan)) if y.is_floating_point() else y

        monkeypatch.setattr(torch.Tensor, name, poisoned)
    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=5))
    monkeypatch.setattr(launch, "_prefill_hopper_kernel", Kernel())
    monkeypatch.setattr(support, "_plans", {})


def call_of(**case):
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "dtype": torch.float16}
    terms = {"window_right": 0, "lse": True, "prefill_dtype": "fp8"}
    return random_call(**{**sizes, **terms, **case})


def relative_error(o, o64):
    """Root mean square of the error over that of the output."""
    return ((o.double() - o64).norm() / o64.norm()).item()


def check(call):
    check_backend(BACKEND, call)


def with_outliers(x):
    """One number in a thousand is ten times as large."""
    return torch.where(torch.rand(x.shape) < 1e-3, 10 * x, x)


BOUNDS = {"normal": (lambda x: x, 0.06), "outliers": (with_outliers, 0.1)}


@pytest.mark.parametrize("window_right", [None, 0], ids=["full", "causal"])
@pytest.mark.parametrize(("change", "bound"), BOUNDS.values(), ids=BOUNDS)
def test_what_8_bits_cost(change, bound, window_right):
    """Of the output's norm: at least 1 %, or nothing is rounded."""
    call = call_of(seqlen_q=1024, head_dim=128, dtype=torch.float32, window_right=window_right)
    call = call._replace(q=change(call.q), k=change(call.k), v=change(call.v))
    (rounded, _), (o64, _) = attention_fp8_reference(call), attention_lse_reference(call)
    assert 0.01 < relative_error(rounded, o64) < bound


TERMS = {
    "causal": {},
    "full": {"window_right": None},
    "a window": {"window_left": 130},
    "both sides": {"window_left": 20, "window_right": 140},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.tensor([-1.0, 2.0])},
    "slopes": {"alibi_slopes": torch.tensor([0.1, 1.0])},
    "rows that see nothing": {"q_offset": -70, "sinks": torch.zeros(2)},
}


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_terms(terms):
    check(call_of(batch=2, seqlen_q=150, seqlen_k=300, **{"q_offset": 150, **terms}))


ROW = torch.arange(300)
HOLES = torch.rand(300, generator=torch.Generator().manual_seed(1)) < 0.7
BEFORE = ROW[None, :] <= ROW[:, None]
MASKS = {
    "padding on the left": {"key_padding": ROW[None, :] >= 140, "window_right": 0},
    "padding on the left, window": {"key_padding": ROW[None, :] >= 40, "window_left": 100, "window_right": 0},
    "padding on the right": {"key_padding": ROW[None, :] < 170},
    "padding of none": {"key_padding": ROW[None, :] >= 0, "key_bounds": key_bounds(0, ROW + 1)},
    "padding with holes": {"key_padding": HOLES[None, :], "window_right": 0},
    "documents": {"key_bounds": key_bounds(ROW // 90 * 90, ROW // 90 * 90 + 90)},
    "gaps": {"key_bounds": key_bounds(ROW // 64 % 3 * 100, ROW // 64 % 3 * 100 + 40)},
    "bounds of each head": {"key_bounds": key_bounds(torch.tensor([[100], [180]]), ROW + 1)},
    "causal": {"attn_mask": BEFORE[None, None]},
    "holes in some tiles": {"attn_mask": (BEFORE & (HOLES | (ROW[:, None] < 128)))[None, None]},
}


@pytest.mark.parametrize("terms", MASKS.values(), ids=MASKS)
def test_masks(terms):
    """Keys that nobody sees are NaN and count in no scale; tiles with holes are triton.prefill's, in 16 bits."""
    call = call_of(batch=2, **{"seqlen_q": 300, "window_right": None, **terms})
    dead = hidden_keys(call).all(dim=2).all(dim=1)[:, None, :, None]
    check(call._replace(k=call.k.masked_fill(dead, math.nan), v=call.v.masked_fill(dead, math.nan)))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_padding_at_other_widths(head_dim):
    check(call_of(batch=2, seqlen_q=140, head_dim=head_dim, key_padding=ROW[:140] >= torch.tensor([[9], [0]])))


def test_padding_counts_in_no_scale():
    """Whatever padded keys hold: the output is the same to the bit."""
    call = call_of(batch=2, seqlen_q=140, key_padding=ROW[:140] >= torch.tensor([[9], [0]]))
    expected = BACKEND.run(call)
    for x in (call.k, call.v):
        x[0, :, :9] = 1000.0
    assert torch.equal(BACKEND.run(call), expected)


@pytest.mark.parametrize("head_dim", WIDTHS)
def test_widths(head_dim):
    check(call_of(seqlen_q=200, head_dim=head_dim))


@pytest.mark.parametrize("seqlen_k", [1, 5, 127, 129])
def test_keys_that_fill_no_block(seqlen_k):
    check(call_of(seqlen_q=70, seqlen_k=seqlen_k, window_right=None))


def test_any_strides():
    call = call_of(seqlen_q=130)
    check(call._replace(q=call.q.repeat_interleave(2, 3)[..., ::2], v=call.v.transpose(2, 3).contiguous().mT))


def test_offsets_on_the_device():
    """Keys behind them are NaN, and count in no scale."""
    call = call_of(batch=2, seqlen_q=130, seqlen_k=400, q_offset=torch.tensor([200, -1]))
    for b, stop in enumerate((330, 129)):
        call.k[b, :, stop:], call.v[b, :, stop:] = math.nan, math.nan
    check(call)


def test_keys_before_every_window_may_be_no_numbers():
    call = call_of(seqlen_q=128, seqlen_k=428, q_offset=300, window_left=20)
    for x in (call.k, call.v):
        x[:, :, :280] = math.nan
    check(call)


def test_queries_count_in_the_scale_of_their_tile_alone():
    call = call_of(seqlen_q=260)
    expected = BACKEND.run(call).clone()
    call.q[:, :, 130] = 1000.0
    assert torch.equal(BACKEND.run(call)[:, :, :128], expected[:, :, :128])
    assert torch.equal(BACKEND.run(call)[:, :, 256:], expected[:, :, 256:])
    check(call)


def test_a_head_of_zeros():
    call = call_of(seqlen_q=70)
    for x in (call.q, call.k, call.v):
        x[:, 0] = 0.0
    assert not BACKEND.run(call)[:, 0].any()


def test_a_value_that_is_no_number_reaches_those_who_see_it_alone():
    """And rows of their tile, but no other tile: it counts in no scale."""
    call = call_of(seqlen_q=260)
    call.v[:, :, 200] = math.nan
    o = BACKEND.run(call)
    assert o[:, :, 200:].isnan().all()
    assert not o[:, :, :128].isnan().any()


def test_v_lies_in_the_order_of_registers():
    """Thread q of four holds keys 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of 16, side by side."""
    call = call_of(seqlen_q=70)
    call.v[:] = torch.arange(70)[:, None]
    plan = fp8.launches(call)
    _q, _k, v, scales = fp8.quantised(call, plan)
    assert v.shape == (1, 1, 64, 128)
    keys = v[0, 0, 0].float() * scales[0, 0, -1]
    order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    torch.testing.assert_close(keys[16:32], 16.0 + torch.tensor(order), rtol=1 / 16, atol=0)
    assert not keys[80:].any()
