"""Root-mean-square norms: which are computed by torch's own kernel, that they are the same, and which stay."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

from attnpatch.rewrites import rms_norm
from attnpatch.rewrites.rms_norm import fuse_norms
from attnpatch.testing.tolerance import assert_same_function, run_float64

N = 48


def llama(x, weight, eps=1e-5):
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def t5(x, weight, eps=1e-6):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    normed = x * torch.rsqrt(variance + eps)
    return weight * normed.to(weight.dtype)


def olmo2(x, weight, eps=1e-6):
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, True) + eps))).to(x.dtype)


def in_other_words(x, weight, eps=1e-5):
    wide = x.type(torch.float32)
    normed = torch.rsqrt(torch.mean(wide**2, dim=(2,), keepdim=True) + eps) * wide
    return normed.clone().type(x.dtype) * weight


def of_a_norm(x, weight):
    return llama(llama(x, weight), llama(weight, weight))


def twice(x, weight):
    return llama(llama(x, weight) + x, weight, 1e-2)


def gemma(x, weight, eps=1e-6):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).type_as(x)


def of_rows(x, weight, eps=1e-5):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + eps))


def of_all(x, weight, eps=1e-5):
    return weight * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + eps))


def cubed(x, weight, eps=1e-5):
    return weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True).abs() + eps))


def of_another(x, weight, eps=1e-5):
    return weight * ((x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def also_read(x, weight, eps=1e-5):
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed + normed


def overwritten(x, weight, eps=1e-5):
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    scaled = x * inverse
    x.zero_()
    return weight * scaled


def of_last_and_rows(x, weight, eps=1e-5):
    return weight * (x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + eps))


def set_inside(x, weight, eps=1e-5):
    wide = x.to(torch.float64).float()
    wide[..., :3] = 7
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))


def clamped_through_a_view(x, weight, eps=1e-5):
    variance = x.pow(2).mean(-1, keepdim=True)
    variance.view(-1).clamp_(min=0.5)
    return weight * (x * torch.rsqrt(variance + eps))


def more_eps(x, weight, eps=1e-5):
    return weight * (x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), eps, alpha=1e4)))


def by_keywords(x, weight, eps=1e-5):
    inverse = torch.rsqrt(torch.add(torch.pow(x, exponent=2).mean(-1, keepdim=True), other=eps))
    return torch.mul(x * inverse, other=weight)


def whole_numbers(x, weight, eps=1e-5):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(torch.int32).to(x.dtype)


def transposed(x, weight):
    return llama(x.transpose(0, 1), weight)


def without_dimensions(x, weight, eps=1e-5):
    x, weight = x[0, 0, 0], weight[0]
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def mapped(x, weight):
    return torch.func.vmap(llama, in_dims=(0, None))(x, weight)


def weight_per_row(x, weight, eps=1e-5):
    return weight[:5, None] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


UNUSUAL = [
    *(of_last_and_rows, set_inside, clamped_through_a_view, more_eps, by_keywords),
    *(whole_numbers, transposed, without_dimensions, mapped),
]


def compiled(function, *args):
    """What the rewritten graph gives, how many norms it had, and the calls of torch's that it makes."""
    found = []

    def backend(gm, _):
        found.append(fuse_norms(gm.graph))
        found.append(len(gm.graph.find_nodes(op="call_function", target=F.rms_norm)))
        gm.graph.lint()
        gm.recompile()
        return gm.forward

    return torch.compile(function, backend=backend, fullgraph=True)(*args), *found


def arguments(dtype, weight_dtype=None):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, N, generator=generator) * torch.logspace(-2, 2, 5)[:, None]
    return x.to(dtype), torch.randn(N, generator=generator).to(weight_dtype or dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("function", "norms"), [(llama, 1), (t5, 1), (olmo2, 1), (twice, 2), (of_a_norm, 3), (in_other_words, 1)]
)
def test_norms_are_torchs(function, norms, dtype):
    args = arguments(dtype)
    result, found, calls = compiled(function, *args)
    assert (found, calls) == (norms, norms)
    assert result.dtype == dtype
    assert_same_function(result, function(*args), run_float64(function, *args))


@pytest.mark.parametrize(
    "function", [*UNUSUAL, of_rows, of_all, cubed, of_another, also_read, overwritten, weight_per_row]
)
def test_what_is_another_function_stays(function):
    expected = function(*arguments(torch.float32))
    result, found, calls = compiled(function, *arguments(torch.float32))
    assert (found, calls) == (0, 0)
    assert torch.equal(result, expected)


@pytest.mark.parametrize(("function", "weight_dtype"), [(llama, torch.float32), (gemma, torch.bfloat16)])
def test_weights_of_another_dtype_stay(function, weight_dtype):
    """Of float32, under rows of bfloat16."""
    args = arguments(torch.bfloat16, weight_dtype)
    result, found, _ = compiled(function, *args)
    assert found == 0
    assert torch.equal(result, function(*args))


def test_a_weight_that_is_computed():
    args = arguments(torch.float32)
    result, found, _ = compiled(gemma, *args)
    assert found == 1
    assert_same_function(result, gemma(*args), run_float64(gemma, *args))


def test_gradients():
    results = []
    for run in (lambda *args: compiled(llama, *args)[0], llama):
        x, weight = (t.requires_grad_() for t in arguments(torch.float32))
        run(x, weight).square().sum().backward()
        results.append((x.grad, weight.grad))
    torch.testing.assert_close(*results)


def test_a_width_that_changes():
    """From the second width on it is a symbol, which torch's norm would get as a number."""
    run = torch.compile(llama, backend=_fusing, fullgraph=True)
    for width in (N, 16, 32):
        x, weight = (t[..., :width].clone() for t in arguments(torch.float32))
        torch.testing.assert_close(run(x, weight), llama(x, weight))


def _fusing(gm, _):
    fuse_norms(gm.graph)
    gm.recompile()
    return gm.forward


def test_tensors_in_wrappers_stay():
    x, weight = (TwoTensor(t, t + 1) for t in arguments(torch.float32))
    result, found, _ = compiled(llama, x, weight)
    assert found == 0
    torch.testing.assert_close((result.a, result.b), (llama(x.a, weight.a), llama(x.b, weight.b)))


def test_autocast_around(monkeypatch):
    """On a GPU it computes this norm in float32, and gives that."""
    norm = torch.nn.functional.rms_norm
    monkeypatch.setattr(rms_norm.F, "rms_norm", lambda *args: norm(*args).float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result, found, _ = compiled(llama, *arguments(torch.bfloat16))
    assert (found, result.dtype) == (0, torch.bfloat16)
