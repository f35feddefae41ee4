"""attnpatch::cache_write on a CUDA device, against the same in plain torch on the CPU: every bit, and nothing else."""

import math
import os

import pytest
import torch

from attnpatch import ops
from attnpatch.kernels.cache_write import reference
from attnpatch.writing import CacheWrite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets; set TRITON_INTERPRET=0"),
]

INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
B, H, CAPACITY, PAGE, PAGES = 3, 4, 96, 16, 40


def poison(*shape, dtype):
    value = -128 if dtype == INT8 else math.nan  # no vector rounds to -128
    return torch.full(shape, value, dtype=torch.float32, device="cuda").to(dtype)


def write_of(tokens, dtype, caches=(None, None), paged=False, width=(128, 128), positions=None):
    """A write of one fused projection to poisoned caches: K's by heads, V's by tokens."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    fused = torch.randn(B, tokens, H, sum(width), device="cuda", generator=generator)
    fused *= torch.logspace(-4, 4, tokens * H, device="cuda").view(tokens, H, 1)
    fused[:, ::3, 0] = 0
    k, v = fused.to(dtype).transpose(1, 2).split(width, dim=-1)
    places, rows = (PAGES, PAGE) if paged else (B, CAPACITY)
    k_cache = poison(places, H, rows, width[0], dtype=caches[0] or dtype)
    v_cache = poison(places, rows, H, width[1], dtype=caches[1] or dtype).transpose(1, 2)
    scales = [None if c is None else poison(places, H, rows, dtype=torch.float32) for c in caches]
    table = torch.randperm(PAGES - 2)[: B * CAPACITY // PAGE].view(B, -1).int().cuda() if paged else None
    if positions is None:
        positions = torch.rand(B, CAPACITY + 4).argsort(1)[:, :tokens].cuda() - 2  # some outside
    return CacheWrite(k_cache, v_cache, k, v, positions, table, *scales)


def to_cpu(write):
    return CacheWrite(*(None if x is None else x.cpu() for x in write))


def assert_same(write, expected):
    for name, x, y in zip(write._fields, write, expected, strict=True):
        if x is not None:
            assert torch.equal(x.cpu().flatten().view(torch.uint8), y.flatten().view(torch.uint8)), name


def check(write):
    expected = to_cpu(write)
    ops.cache_write(*write)
    reference.cache_write(*expected)
    assert_same(write, expected)


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("tokens", [1, 2, 16, 77])
@pytest.mark.parametrize("caches", [(None, None), (INT8, INT8), (E4M3, E4M3), (E5M2, None), (None, INT8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kinds(dtype, caches, tokens, paged):
    check(write_of(tokens, dtype, caches, paged))


@pytest.mark.parametrize("width", [(64, 64), (80, 96), (192, 128), (1, 3), (576, 512)], ids=str)
@pytest.mark.parametrize("caches", [(None, None), (INT8, E4M3)], ids=str)
def test_widths(width, caches):
    check(write_of(5, torch.bfloat16, caches, width=width))


@pytest.mark.parametrize("positions", [7, 95, CAPACITY, -1], ids=str)
def test_one_position(positions):
    for tokens in (1, 3):
        check(write_of(tokens, torch.bfloat16, (INT8, None), positions=torch.tensor(positions, device="cuda")))


def test_every_rounding_of_8_bits():
    """Vectors that meet every step of each dtype, ties among them: with the largest code in it, the scale is 1."""
    for dtype, limit in reference.LIMITS.items():
        x = torch.linspace(-limit, limit, 4096, device="cuda").view(1, 1, 16, 256).clone()
        if dtype == INT8:
            x = (x * 4).round() / 4
        x[..., 0] = limit
        caches = (poison(1, 1, 16, 256, dtype=dtype) for _ in range(2))
        scales = (poison(1, 1, 16, dtype=torch.float32) for _ in range(2))
        write = CacheWrite(*caches, x, -x, torch.tensor(0, device="cuda"), None, *scales)
        check(write)
        assert write.k_scale.eq(1).all()


def test_misaligned_after_aligned():
    """Vectors and caches off by one element must not meet the kernel that was compiled for aligned ones."""
    x = torch.randn(2 * 2 * 128 + 8, device="cuda", dtype=torch.bfloat16)
    for shift in (0, 1, 3, 8):
        cache = poison(4 * 128 + 8, dtype=torch.bfloat16)
        k, k_cache = x[shift:][:512].view(1, 2, 2, 128), cache[shift:][:512].view(1, 2, 2, 128)
        v_cache = torch.zeros_like(k_cache)
        ops.cache_write(k_cache, v_cache, k, k, torch.tensor(0, device="cuda"))
        assert torch.equal(k_cache, k)
        assert torch.equal(v_cache, k)
        assert cache.isnan().sum() == 8


def test_beyond_32_bits():
    """A cache of more than 2**31 elements; what a 32 bit offset would reach stays poison."""
    rows = 2**24 + 3
    k_cache = torch.full((1, 1, rows, 128), -128, dtype=INT8, device="cuda")
    k, v = torch.randn(1, 1, 1, 128, device="cuda"), torch.randn(1, 1, 1, 8, device="cuda")
    v_cache, scale = torch.zeros(1, 1, rows, 8, device="cuda"), torch.zeros(1, 1, rows, device="cuda")
    ops.cache_write(k_cache, v_cache, k, v, torch.tensor(rows - 2, device="cuda"), None, scale)
    codes, expected = reference.quantised(k.cpu(), INT8)
    assert torch.equal(k_cache[0, 0, rows - 2].cpu(), codes[0, 0, 0])
    assert torch.equal(scale[0, 0, rows - 2].cpu(), expected[0, 0, 0])
    assert (k_cache != -128).any(-1).sum() == (scale != 0).sum() == (v_cache != 0).any(-1).sum() == 1


def test_a_captured_graph_follows_the_positions():
    write = write_of(1, torch.bfloat16, (INT8, None), paged=True, positions=torch.tensor(3, device="cuda"))
    expected = to_cpu(write)
    ops.cache_write(*write)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.cache_write(*write)
    reference.cache_write(*expected)
    for position in (4, 15, 16, 95, 96):
        write.positions.fill_(position)
        graph.replay()
        reference.cache_write(*expected._replace(positions=torch.tensor(position)))
        assert_same(write._replace(positions=expected.positions.cuda()), expected)


def test_compiled():
    def step(k_cache, v_cache, qkv, position, table, k_scale, v_scale):
        k, v = (qkv * 2).split(128, dim=-1)
        ops.cache_write(k_cache, v_cache, k, v, position, table, k_scale, v_scale)
        return k_cache.float() * k_scale[..., None] + 1

    write = write_of(1, torch.bfloat16, (INT8, INT8), paged=True, positions=torch.tensor(3, device="cuda"))
    expected = CacheWrite(*(x.clone() for x in write))
    qkv = torch.cat([write.k, write.v], -1)
    with torch.no_grad():
        found = torch.compile(step, fullgraph=True)(*write[:2], qkv, *write[4:])
        wanted = step(*expected[:2], qkv, *expected[4:])
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert_same(write, to_cpu(expected))
