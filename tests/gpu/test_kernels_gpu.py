"""triton.prefill and triton.decode on a CUDA device (run with TRITON_INTERPRET=0)."""

import math

import pytest
import torch

from attnpatch import dispatch
from attnpatch.dispatch import load_backend
from attnpatch.kernels.decode.launch import decode
from attnpatch.testing.inputs import check_backend, random_call
from attnpatch.testing.samples import check_samples
from tests.gpu.calls import CUDA, ON_GPU, bias, bool_mask, call_on_gpu, prefill_backend

pytestmark = ON_GPU


def name(backend):
    return pytest.param(backend, id=backend)


@pytest.fixture(params=["triton.prefill_hopper", "triton.prefill", "triton.decode"])
def plain_backend(request):
    """Each that takes plain K and V, where this device has it."""
    if request.param == "triton.prefill_hopper":
        request.getfixturevalue("hopper")
    return request.param


PREFILL = {
    "causal": {"seqlen_q": 1000, "window_right": 0},
    "full": {"seqlen_q": 777},
    "few rows, no term": {"seqlen_q": 3, "seqlen_k": 1000},
    "window": {"seqlen_q": 1000, "window_left": 200, "window_right": 0},
    "both sides": {"seqlen_q": 500, "window_left": 100, "window_right": 77},
    "bottom-right": {"seqlen_q": 100, "seqlen_k": 700, "q_offset": 600, "window_right": 0},
    "one row": {"seqlen_q": 1, "seqlen_k": 700, "q_offset": 600, "window_right": 0},
    "rows without keys": {"seqlen_q": 300, "seqlen_k": 100, "q_offset": -150, "window_right": 0},
    "offsets on the device": {
        "seqlen_q": 100,
        "seqlen_k": 700,
        "q_offset": torch.tensor([600, 13]),
        "window_right": 0,
    },
    "padding": {"seqlen_q": 333, "key_padding": bool_mask(2, 333), "window_right": 0},
    "bool mask": {"seqlen_q": 333, "attn_mask": bool_mask(2, 1, 333, 333)},
    "bias": {"seqlen_q": 333, "attn_mask": bias(1, 8, 333, 333)},
    "bfloat16 bias, one row": {"seqlen_q": 333, "attn_mask": bias(2, 1, 1, 333).bfloat16()},
    "softcap": {"seqlen_q": 333, "softcap": 5.0, "window_right": 0},
    "softcap, large logits": {"seqlen_q": 333, "softcap": 50.0, "sm_scale": 300.0, "window_right": 0},
    "large logits": {"seqlen_q": 333, "sm_scale": 300.0, "window_right": 0},
    "everything": {
        "seqlen_q": 200,
        "seqlen_k": 300,
        "attn_mask": bias(1, 8, 200, 300),
        "key_padding": bool_mask(2, 300),
        "q_offset": torch.tensor([100, 10]),
        "window_left": 150,
        "window_right": 0,
        "softcap": 5.0,
    },
}


@pytest.mark.parametrize("case", PREFILL.values(), ids=PREFILL)
def test_prefill_terms(case):
    check_backend(load_backend("triton.prefill"), call_on_gpu(**case))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", ["causal", "full", "everything"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_dtypes(case, dtype, head_dim):
    check_backend(load_backend("triton.prefill"), call_on_gpu(dtype=dtype, head_dim=head_dim, **PREFILL[case]))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(16, 16), (32, 32), (40, 40), (64, 64), (80, 80), (96, 96), (100, 60), (128, 128), (192, 128), (256, 256)],
    ids=str,
)
def test_prefill_head_dims(head_dim, head_dim_v):
    call = call_on_gpu(head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=300, window_right=0)
    check_backend(load_backend("triton.prefill"), call)


DECODE = {
    "no term": {"seqlen_k": 5000},
    "cache with room": {"seqlen_k": 5000, "q_offset": torch.tensor(3000), "window_right": 0},
    "one offset each": {"seqlen_k": 5000, "q_offset": torch.tensor([17, 4999]), "window_right": 0},
    "one is empty": {"seqlen_k": 5000, "q_offset": torch.tensor([-1, 4999]), "window_right": 0},
    "window": {"seqlen_k": 5000, "q_offset": torch.tensor(4000), "window_left": 1023, "window_right": 0},
    "short": {"seqlen_k": 7},
    "padding": {"seqlen_k": 3000, "key_padding": bool_mask(2, 3000)},
    "bool mask": {"seqlen_k": 3000, "attn_mask": bool_mask(2, 1, 1, 3000)},
    "bias": {"seqlen_k": 3000, "attn_mask": bias(1, 8, 1, 3000)},
    "softcap": {"seqlen_k": 3000, "softcap": 5.0},
    "large logits": {"seqlen_k": 3000, "sm_scale": 300.0},
}


def check_decode(call, num_splits=0):
    check_backend(load_backend("triton.decode")._replace(run=lambda call: decode(call, num_splits)), call)


@pytest.mark.parametrize("num_splits", [0, 1, 7])
@pytest.mark.parametrize("case", DECODE.values(), ids=DECODE)
def test_decode_terms(case, num_splits):
    check_decode(call_on_gpu(seqlen_q=1, **case), num_splits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_decode_dtypes(dtype, head_dim):
    check_decode(call_on_gpu(seqlen_q=1, seqlen_k=2000, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(16, 16), (32, 32), (40, 40), (64, 64), (80, 80), (100, 60), (192, 128), (256, 256)],
    ids=str,
)
def test_decode_head_dims(head_dim, head_dim_v):
    check_decode(call_on_gpu(seqlen_q=1, seqlen_k=2000, head_dim=head_dim, head_dim_v=head_dim_v))


@pytest.mark.parametrize("heads", [(8, 8), (9, 3), (8, 1), (20, 1), (71, 1)], ids=str)
def test_decode_groups(heads):
    check_decode(call_on_gpu(seqlen_q=1, seqlen_k=2000, num_heads=heads[0], num_kv_heads=heads[1]))


@pytest.mark.parametrize("backend", map(name, ("triton.prefill", "triton.decode")))
@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.contiguous(),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: torch.cat([x, x], dim=3)[..., : x.shape[3]],
        lambda x: torch.cat([x, x], dim=3)[..., 1 : x.shape[3] + 1],
        lambda x: x[:, :1].expand_as(x),
    ],
    ids=["heads outside", "transposed", "sliced", "sliced, odd base", "expanded"],
)
def test_layouts(layout, backend):
    rows = 300 if backend == "triton.prefill" else 1
    call = call_on_gpu(seqlen_q=rows, seqlen_k=300, head_dim=64)
    check_backend(load_backend(backend), call._replace(k=layout(call.k), v=layout(call.v)))


def test_poisoned_tail(plain_backend):
    """Descriptor loads take whole tiles: what lies behind the valid length must not count."""
    rows = 1 if plain_backend == "triton.decode" else 100
    offsets = torch.tensor([300, 13], device=CUDA)
    call = call_on_gpu(seqlen_q=rows, seqlen_k=1000, q_offset=offsets, window_right=0)
    dead = (torch.arange(1000, device=CUDA) > offsets[:, None] + rows - 1)[:, None, :, None]
    poisoned = call._replace(k=call.k.masked_fill(dead, math.nan), v=call.v.masked_fill(dead, math.nan))
    assert torch.equal(check_backend(load_backend(plain_backend), poisoned), load_backend(plain_backend).run(call))


BENCHMARKED = {
    "B4 H32/8 S4096 D128 causal": ((4, 32, 8, 4096, 4096, 128), {"window_right": 0}),
    "B4 H32/32 S4096 D64 causal": ((4, 32, 32, 4096, 4096, 64), {"window_right": 0}),
    "B2 H16/8 S8192 D256 causal": ((2, 16, 8, 8192, 8192, 256), {"window_right": 0}),
    "B4 H32/8 S4096 D128 full": ((4, 32, 8, 4096, 4096, 128), {}),
    "B4 H32/8 S4096 D128 window 1024": ((4, 32, 8, 4096, 4096, 128), {"window_left": 1023, "window_right": 0}),
    "B1 H9/3 S4096 D64 causal": ((1, 9, 3, 4096, 4096, 64), {"window_right": 0}),
    "B8 H32/8 S32768 D128": ((8, 32, 8, 1, 32768, 128), {"window_right": 0, "q_offset": 32767}),
    "B1 H32/8 S4096 D128": ((1, 32, 8, 1, 4096, 128), {"window_right": 0, "q_offset": 4095}),
    "B1 H32/8 S32768 D128": ((1, 32, 8, 1, 32768, 128), {"window_right": 0, "q_offset": 32767}),
    "B1 H9/3 S4096 D64": ((1, 9, 3, 1, 4096, 64), {"window_right": 0, "q_offset": 4095}),
}


@pytest.mark.parametrize(("sizes", "terms"), BENCHMARKED.values(), ids=BENCHMARKED)
def test_benchmarked_shapes(sizes, terms):
    """Right on sampled rows, the same bits every time, and the backend that dispatch takes by itself."""
    call = random_call(*sizes, dtype=torch.bfloat16, device="cuda", **terms)
    backend, why = dispatch.choose(call)
    assert backend.name == ("triton.decode" if call.seqlen_q == 1 else prefill_backend()), why
    o = backend.run(call)
    check_samples(o, call)
    assert all(torch.equal(backend.run(call), o) for _ in range(5))


def test_cache_of_more_than_2_to_the_31_elements():
    seqlen = 2**21 + 5000
    call = random_call(1, 4, 4, 1, 1, 256, dtype=torch.bfloat16, device="cuda", window_right=0)
    cache = torch.randn(2, 1, seqlen, 4, 256, dtype=torch.bfloat16, device=CUDA).transpose(2, 3)
    call = call._replace(k=cache[0], v=cache[1], q_offset=torch.tensor(seqlen - 1, device=CUDA))
    assert call.k.numel() > 2**31
    check_samples(decode(call), call)
    rows = torch.randn(1, 70, 4, 256, dtype=torch.bfloat16, device=CUDA).transpose(1, 2)
    call = call._replace(q=rows, q_offset=seqlen - 70, window_left=1000)
    check_samples(load_backend("triton.prefill").run(call), call)


def test_a_graph_replays_with_another_offset(plain_backend):
    rows = 1 if plain_backend == "triton.decode" else 20
    offset = torch.tensor([100, 7], device=CUDA)
    call = call_on_gpu(seqlen_q=rows, seqlen_k=4096, q_offset=offset, window_right=0)
    run = load_backend(plain_backend).run
    run(call)  # compiles outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(call)
    for values in ([100, 7], [4000, 0], [-1, 2047]):
        offset.copy_(torch.tensor(values))
        captured.fill_(math.nan)
        graph.replay()
        assert torch.equal(captured, run(call))
        check_samples(captured, call)


def test_nothing_waits_for_the_device(plain_backend):
    rows = 1 if plain_backend == "triton.decode" else 20
    call = call_on_gpu(seqlen_q=rows, seqlen_k=4096, q_offset=torch.tensor([100, 7]), window_right=0)
    load_backend(plain_backend).run(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        load_backend(plain_backend).run(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_lengths_do_not_recompile():
    """One kernel serves every length; odd ones and 1 are what Triton would specialise."""
    from attnpatch.kernels.decode.kernel import _split_kernel
    from attnpatch.kernels.prefill.kernel import _prefill_kernel

    def compiled(kernel):
        return len(kernel.device_caches[torch.cuda.current_device()][0])

    for backend, kernel, rows in (
        ("triton.decode", _split_kernel, lambda n: 1),
        ("triton.prefill", _prefill_kernel, lambda n: n),
    ):
        for n in (17, 64, 65):  # flash-decode with one split, and with several
            call = call_on_gpu(seqlen_q=rows(n), seqlen_k=n, head_dim=72, window_right=0)
            load_backend(backend).run(call)
        before = compiled(kernel)
        for n in (1, 2, 16, 17, 100, 111, 128, 500):
            call = call_on_gpu(seqlen_q=rows(n), seqlen_k=n, head_dim=72, window_right=0)
            load_backend(backend).run(call)
        assert compiled(kernel) <= before + 1  # strides of a dimension of size 1 may differ


def test_tf32_only_where_torch_allows_it():
    call = call_on_gpu(seqlen_q=300, head_dim=64, dtype=torch.float32, window_right=0)
    run = load_backend("triton.prefill").run
    exact = run(call)
    torch.set_float32_matmul_precision("high")
    try:
        rounded = run(call)
    finally:
        torch.set_float32_matmul_precision("highest")
    difference = (rounded - exact).abs().max().item()
    assert 1e-5 < difference < 1e-2
