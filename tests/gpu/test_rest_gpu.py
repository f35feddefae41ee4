"""Norms and rotary embeddings of the rest on a GPU, against float64."""

import pytest
import torch

import attnpatch
from attnpatch import rotary
from attnpatch.testing.tolerance import assert_same_function, run_float64
from tests.gpu.test_generate_gpu import left_padded, tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = {"decode": (1, 32, 1, 128), "batch": (32, 9, 1, 64), "prefill": (2, 8, 3001, 96), "tiny": (1, 1, 1, 2)}


def written(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rotary(shape, dtype):
    batch, heads, rows, channels = shape
    torch.manual_seed(0)
    whole = torch.full((batch, rows, heads, channels + 8), torch.nan, device="cuda", dtype=dtype)
    x = whole[..., 8:].normal_().transpose(1, 2)
    angles = torch.randn(batch, 1, rows, channels, device="cuda")
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    found = rotary.rotary(x, cos, sin)
    assert found.stride() == torch.empty_like(x).stride()
    assert_same_function(found, written(x, cos, sin), written(x.double(), cos.double(), sin.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits(dtype):
    model, inputs = tiny_llama(dtype), left_padded(90)
    rows = inputs["attention_mask"].bool()
    with torch.no_grad():
        original, exact = model(**inputs).logits, run_float64(model, **inputs).logits
        with attnpatch.patched(model, strict=True, cache=None), torch.profiler.profile() as profile:
            found = model(**inputs).logits
    names = {event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA}
    assert any("_rotary_kernel" in name for name in names)
    assert not any("rsqrt" in name for name in names)
    assert_same_function(found, original, exact, rows)
