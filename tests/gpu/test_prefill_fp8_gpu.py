"""triton.prefill_fp8 on a CUDA device (run with TRITON_INTERPRET=0)."""

import math

import pytest
import torch

from attnpatch.dispatch import FP8, choose, load_backend
from attnpatch.kernels.reference import attention_fp8_reference, attention_lse_reference, hidden_keys
from attnpatch.testing.inputs import check_backend, key_bounds
from attnpatch.testing.samples import samples
from attnpatch.testing.tolerance import assert_same_function
from tests.gpu.calls import ON_GPU, call_on_gpu

pytestmark = [*ON_GPU, pytest.mark.usefixtures("hopper")]

BOUND = 0.07
"""On the error against float64 over the norm of the output, where each row sees many keys: 0.05 is that of rounding."""


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    """All that is allocated holds NaN before."""
    for name in ("new_empty", "new_empty_strided"):
        allocate = getattr(torch.Tensor, name)

        def poisoned(x, *sizes, allocate=allocate, **options):
            y = allocate(x, *sizes, **options)
            return y.copy_(torch.full_like(y, math.nan, dtype=torch.float32)) if y.is_floating_point() else y

        monkeypatch.setattr(torch.Tensor, name, poisoned)


def fp8_call(**case):
    return call_on_gpu(**{"prefill_dtype": "fp8", "lse": True, **case})


def relative_error(o, o64):
    return ((o.double() - o64).norm() / o64.norm()).item()


def check(call, bound=None):
    """As right as its reference, and within ``bound`` of float64; the output."""
    backend, _ = choose(call)
    assert backend.name == FP8
    o = check_backend(backend, call)
    if bound is not None:
        assert relative_error(o, attention_lse_reference(call)[0]) < bound
    return o


TERMS = {
    "causal": {"window_right": 0},
    "full": {},
    "window": {"window_left": 200, "window_right": 0},
    "both sides": {"window_left": 20, "window_right": 140},
    "bottom-right": {"seqlen_k": 1100, "q_offset": 400, "window_right": 0},
    "cross": {"seqlen_k": 333},
    "rows without keys": {"q_offset": -200, "window_right": 0},
    "softcap": {"softcap": 5.0, "window_right": 0},
    "sinks and slopes": {
        "sinks": torch.linspace(-1, 1, 8),
        "alibi_slopes": torch.linspace(0.1, 1, 8),
        "window_right": 0,
    },
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", TERMS)
def test_terms(name, head_dim, dtype):
    check(fp8_call(seqlen_q=700, head_dim=head_dim, dtype=dtype, **TERMS[name]))


ROW = torch.arange(700)
HOLES = torch.rand(700, generator=torch.Generator().manual_seed(1)) < 0.7
LEFT = torch.tensor([[250], [0]]) <= ROW
MASKS = {
    "padding on the left": {"key_padding": LEFT, "window_right": 0},
    "padding on the left, window": {"key_padding": LEFT, "window_left": 100, "window_right": 0},
    "padding of none": {"key_padding": ROW[None] >= 0, "key_bounds": key_bounds(0, ROW + 1)},
    "padding with holes": {"key_padding": HOLES[None], "window_right": 0},
    "documents": {"key_bounds": key_bounds(ROW // 90 * 90, ROW // 90 * 90 + 90)},
    "bounds of each head": {"key_bounds": key_bounds(torch.arange(8)[:, None] * 9, ROW + 1)},
    "holes in some tiles": {"attn_mask": ((ROW[:, None] >= ROW) & (HOLES | (ROW[:, None] < 256)))[None, None]},
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, head_dim):
    """Keys that nobody sees are NaN."""
    call = fp8_call(seqlen_q=700, head_dim=head_dim, **MASKS[name])
    dead = hidden_keys(call).all(dim=2).all(dim=1)[:, None, :, None]
    check(call._replace(k=call.k.masked_fill(dead, math.nan), v=call.v.masked_fill(dead, math.nan)))


@pytest.mark.parametrize("seqlen", [2, 63, 65, 127, 129, 255, 257, 1000, 4000])
@pytest.mark.parametrize("window_right", [None, 0], ids=["full", "causal"])
def test_lengths(seqlen, window_right):
    sizes = {"batch": 1, "num_heads": 4, "num_kv_heads": 1} if seqlen > 1000 else {}
    check(fp8_call(head_dim=128, seqlen_q=seqlen, window_right=window_right, **sizes), BOUND)


@pytest.mark.parametrize("heads", [(8, 8), (9, 3), (8, 1)], ids=str)
def test_groups(heads):
    check(fp8_call(num_heads=heads[0], num_kv_heads=heads[1], head_dim=128, seqlen_q=500, window_right=0), BOUND)


def test_offsets_on_the_device():
    """Keys behind them are NaN, and count in no scale."""
    call = fp8_call(seqlen_q=300, seqlen_k=900, head_dim=128, q_offset=torch.tensor([500, 7]), window_right=0)
    for b, stop in enumerate((800, 307)):
        call.k[b, :, stop:], call.v[b, :, stop:] = math.nan, math.nan
    check(call)


@pytest.mark.parametrize("window_right", [None, 0], ids=["full", "causal"])
def test_long_sequences(window_right):
    """Accumulators of 8 bit products keep about 14 bits: long sums lose no more than twice what rounding does."""
    call = fp8_call(batch=1, head_dim=128, seqlen_q=16384, window_right=window_right, lse=None)
    o = load_backend(FP8).run(call)
    for index, part in samples(call):
        o64 = attention_lse_reference(part)[0]
        assert_same_function(o[index], attention_fp8_reference(part)[0], o64)


def test_graphs_replay():
    call = fp8_call(head_dim=128, seqlen_q=500, window_right=0)
    first = check(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = load_backend(FP8).run(call)
    captured.fill_(math.nan)
    graph.replay()
    assert torch.equal(captured, first)


def test_it_repeats_to_the_bit():
    call = fp8_call(head_dim=128, seqlen_q=2000, window_right=0)
    first = load_backend(FP8).run(call)
    assert all(torch.equal(load_backend(FP8).run(call), first) for _ in range(20))
