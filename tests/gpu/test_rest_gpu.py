"""Norms, rotary embeddings and linear layers of the rest on a GPU, against float64."""

import pytest
import torch

import attnpatch
from attnpatch import linear, rotary
from attnpatch.kernels.linear import launch
from attnpatch.testing.tolerance import assert_same_function, run_float64
from tests.gpu.test_generate_gpu import left_padded, tiny_llama
from tests.kernels.test_linear import arguments
from tests.kernels.test_linear import written as written_linear

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
    xs = [x, x[:, : -(-heads // 4)]]
    for one, found in zip(xs, rotary.rotary(xs, cos, sin), strict=True):
        assert found.stride() == torch.empty_like(one).stride()
        assert_same_function(found, written(one, cos, sin), written(one.double(), cos.double(), sin.double()))


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


LINEARS = {
    "8B qkv": ([4096, 1024, 1024], 4096, {"normed": True}),
    "8B gated": ([14336, 14336], 4096, {"normed": True, "activation": "silu"}),
    "8B down": ([4096], 14336, {"residual": True}),
    "head": ([launch.MANY_ROWS + 3], 2048, {}),
    "biased": ([7, 130, 1], 1030, {"biased": (0, 2)}),
    "gelu": ([33, 33], 48, {"biased": (1,), "residual": True, "activation": "gelu"}),
    "gelu_tanh": ([129, 129], 999, {"normed": True, "activation": "gelu_tanh"}),
    "tiny": ([1], 1, {}),
}


@pytest.fixture
def poisoned():
    """``new_empty`` gives NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "columns", "options"), LINEARS.values(), ids=LINEARS)
def test_linear(rows, columns, options, dtype):
    args = arguments(dtype, rows, columns, torch.Generator().manual_seed(0), **options)
    with torch.device("cuda"):
        args = torch.utils._pytree.tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, args)
    found = linear.linear(*args)
    originals, exact = written_linear(*args), run_float64(written_linear, *args)
    for y, original, y64 in zip(found, originals, exact, strict=True):
        assert_same_function(y, original, y64)
    assert all(torch.equal(y, again) for _ in range(19) for y, again in zip(found, linear.linear(*args), strict=True))


def test_linear_reads_what_the_kernel_before_wrote():
    """It starts up while that still runs: a chain of layers, each as long as what it waits for is not."""
    torch.manual_seed(0)
    x = torch.randn(1, 512, device="cuda", dtype=torch.bfloat16)
    long, short = (torch.randn(n, 512, device="cuda", dtype=torch.bfloat16) / 512**0.5 for n in (100_000, 512))
    expected = actual = x
    for _ in range(50):
        expected = torch.nn.functional.linear(expected.float(), short.float()).bfloat16()
        wide = linear.linear(actual, [long], [None])[0]
        actual = linear.linear(actual, [short], [None])[0]
        assert not wide.isnan().any()
    torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_decode(rest):
    model, ids = tiny_llama(torch.bfloat16), torch.randint(3, 60, (1, 40), device="cuda")
    with torch.no_grad():
        original, exact = (call(model, ids).logits[:, -1] for call in (type(model).__call__, run_float64))
        with attnpatch.patched(model, strict=True, rest=rest, cache="buffered", cuda_graphs=False):
            cache = attnpatch.BufferedCache(model)
            model(ids[:, :38], past_key_values=cache)
            model(ids[:, 38:39], past_key_values=cache)
            with torch.profiler.profile() as profile:
                found = model(ids[:, 39:], past_key_values=cache).logits[:, -1]
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    layers = model.config.num_hidden_layers
    assert sum("_linear_kernel" in name for name in names) == 4 * layers + 1
    assert sum("gemv" in name or "gemm" in name for name in names) <= 1  # the rotary embedding's angles
    assert_same_function(found, original, exact)
