"""triton.prefill_hopper on a CUDA device (run with TRITON_INTERPRET=0)."""

import pytest
import torch

from attnpatch.dispatch import load_backend
from attnpatch.testing.inputs import check_backend, key_bounds
from tests.gpu.calls import CUDA, ON_GPU, bool_mask, call_on_gpu
from tests.gpu.test_kernels_gpu import PREFILL

NAME = "triton.prefill_hopper"

pytestmark = [*ON_GPU, pytest.mark.usefixtures("hopper")]


def check(**case):
    check_backend(load_backend(NAME), call_on_gpu(**case))


@pytest.mark.parametrize(
    "name",
    [
        *("causal", "full", "few rows, no term", "window", "both sides", "bottom-right", "rows without keys"),
        *("offsets on the device", "padding"),
        *("softcap", "softcap, large logits", "large logits"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_terms(name, dtype):
    check(dtype=dtype, head_dim=128, **PREFILL[name])


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(16, 16), (40, 40), (64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (192, 192), (256, 256)],
    ids=str,
)
@pytest.mark.parametrize("window_left", [None, 130], ids=["causal", "window"])
def test_head_dims(head_dim, head_dim_v, window_left):
    check(head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=700, window_left=window_left, window_right=0)


@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 1000, 4001])
@pytest.mark.parametrize("window_right", [None, 0], ids=["full", "causal"])
def test_lengths(seqlen, window_right):
    check(head_dim=64, seqlen_q=seqlen, window_right=window_right, lse=True)


@pytest.mark.parametrize("heads", [(8, 8), (9, 3), (8, 1), (71, 1)], ids=str)
def test_groups(heads):
    check(num_heads=heads[0], num_kv_heads=heads[1], head_dim=128, seqlen_q=500, window_right=0)


@pytest.mark.parametrize("window_right", [None, 0], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ["documents", "gaps", "padding with holes"])
def test_bounds(kind, window_right):
    rows = torch.arange(700)
    if kind == "documents":
        first, stop = rows // 130 * 130, (rows // 130 + 1) * 130
    else:
        first, stop = (rows // 64 % 3) * 200, (rows // 64 % 3) * 200 + 77
    terms = {"key_bounds": key_bounds(first, stop.clamp(max=700)).expand(2, 8, 700, 3)}
    if kind == "padding with holes":
        terms = {"key_padding": bool_mask(2, 700)}
    check(head_dim=128, seqlen_q=700, window_right=window_right, **terms)


def test_alibi_and_sinks():
    generator = torch.Generator().manual_seed(0)
    slopes, sinks = torch.rand(8, generator=generator), torch.randn(8, generator=generator)
    check(head_dim=128, seqlen_q=500, window_right=0, alibi_slopes=slopes, sinks=sinks)


def test_sinks_of_rows_that_see_no_key():
    """Zeros, and -inf as their lse, sinks or not."""
    terms = {"seqlen_q": 300, "seqlen_k": 100, "q_offset": -150, "window_right": 0}
    check(head_dim=128, sinks=torch.linspace(-1, 1, 8), lse=True, **terms)


def test_many_tiles_and_repeats():
    call = call_on_gpu(batch=4, num_heads=32, num_kv_heads=8, head_dim=128, seqlen_q=2048, window_right=0)
    backend = load_backend(NAME)
    check_backend(backend, call)
    first = backend.run(call)
    assert all(torch.equal(backend.run(call), first) for _ in range(20))


def test_strides_of_a_fused_projection():
    """q, k and v as views of one ``[batch, seqlen, 3, heads, head_dim]``."""
    qkv = torch.randn(2, 300, 3, 4, 128, device=CUDA, dtype=torch.bfloat16)
    call = call_on_gpu(num_heads=4, num_kv_heads=4, head_dim=128, seqlen_q=300, window_right=0)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    check_backend(load_backend(NAME), call._replace(q=q, k=k, v=v))
