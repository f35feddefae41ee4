"""attnpatch::cache_write into TBQ4 caches on a CUDA device, against attnpatch.tbq4.encode on the CPU."""

import math
import os

import pytest
import torch

from attnpatch import ops, tbq4
from attnpatch.kernels.cache_write import reference
from attnpatch.tbq4 import codec
from attnpatch.writing import CacheWrite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets; set TRITON_INTERPRET=0"),
]

B, H, CAPACITY, PAGE, PAGES = 3, 4, 96, 16, 40
UNTOUCHED = 0xA5
TIE = 1e-5
"""How far from a boundary float32 may see a channel on its other side."""


def cache(outer, width, kind, dtype):
    """A poisoned cache of "tbq4", "int8" or "dense", and what stands beside it."""
    if kind == "dense":
        return torch.full((*outer, width), math.nan, dtype=dtype, device="cuda"), None
    if kind == "int8":
        codes = torch.full((*outer, width), -128, dtype=torch.int8, device="cuda")
        return codes, torch.full(outer, math.nan, device="cuda")
    norms = torch.full((*outer, len(tbq4.blocks_of(width))), math.nan, dtype=torch.float16, device="cuda")
    return torch.full((*outer, width // 2), UNTOUCHED, dtype=torch.uint8, device="cuda"), norms


def write_of(tokens, dtype, kinds=("tbq4", "tbq4"), paged=False, width=(128, 128), positions=None):
    """A write of one fused projection, of lengths from 1e-3 to 1e3 and some zero, to poisoned caches."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    fused = torch.randn(B, tokens, H, sum(width), device="cuda", generator=generator)
    fused *= torch.logspace(-3, 3, tokens * H, device="cuda").view(tokens, H, 1)
    fused[:, ::3, 0] = 0
    k, v = fused.to(dtype).transpose(1, 2).split(width, dim=-1)
    outer = (PAGES, H, PAGE) if paged else (B, H, CAPACITY)
    k_cache, k_scale = cache(outer, width[0], kinds[0], dtype)
    v_cache, v_scale = cache(outer, width[1], kinds[1], dtype)
    table = torch.randperm(PAGES - 2)[: B * CAPACITY // PAGE].view(B, -1).int().cuda() if paged else None
    if positions is None:
        positions = torch.rand(B, CAPACITY + 4).argsort(1)[:, :tokens].cuda() - 2  # some outside
    return CacheWrite(k_cache, v_cache, k, v, positions, table, k_scale, v_scale)


def to_cpu(write):
    return CacheWrite(*(None if x is None else x.cpu() for x in write))


def assert_same_codes(codes, norms, expected_codes, expected_norms):
    """But for a few codes on the other side of their boundary, and the last bit of norms."""
    differ = codec.unpack(codes.cpu()) != codec.unpack(expected_codes)
    assert differ.sum() <= 2 + 1e-5 * differ.numel()
    apart = norms.cpu().view(torch.int16).int() - expected_norms.view(torch.int16).int()
    assert apart.abs().max() <= (1 if not differ.any() else 8)
    assert torch.equal(norms.isnan().cpu(), expected_norms.isnan())


def check(write):
    expected = to_cpu(write)
    ops.cache_write(*write)
    reference.cache_write(*expected)
    for side in (0, 1):
        ours, wanted = (write[side], write[6 + side]), (expected[side], expected[6 + side])
        if ours[0].dtype == torch.uint8:
            assert_same_codes(*ours, *wanted)
        else:
            for x, y in zip(ours, wanted, strict=True):
                assert x is None or torch.equal(x.cpu().flatten().view(torch.uint8), y.flatten().view(torch.uint8))


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("tokens", [1, 2, 16, 77])
@pytest.mark.parametrize("kinds", [("tbq4", "tbq4"), ("int8", "tbq4"), ("tbq4", "dense")], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kinds(dtype, kinds, tokens, paged):
    check(write_of(tokens, dtype, kinds, paged))


@pytest.mark.parametrize("width", [(64, 64), (80, 96), (192, 128), (256, 256), (8, 120), (40, 320)], ids=str)
@pytest.mark.parametrize("tokens", [1, 9])
def test_widths(width, tokens):
    check(write_of(tokens, torch.bfloat16, width=width))


@pytest.mark.parametrize("positions", [7, 95, CAPACITY, -1], ids=str)
def test_one_position(positions):
    for tokens in (1, 3):
        check(write_of(tokens, torch.bfloat16, positions=torch.tensor(positions, device="cuda")))


def test_codes_differ_at_boundaries_alone():
    x = torch.randn(1, 1, 40_000, 128, device="cuda")
    codes = torch.zeros(1, 1, 40_000, 64, dtype=torch.uint8, device="cuda")
    norms = torch.zeros(1, 1, 40_000, 1, dtype=torch.float16, device="cuda")
    ops.cache_write(codes, codes.clone(), x, x, torch.tensor(0, device="cuda"), None, norms, norms.clone())
    expected_codes, expected_norms = tbq4.encode(x.cpu())
    units, _ = codec.rotated_units(x.cpu())
    differ = codec.unpack(codes.cpu()) != codec.unpack(expected_codes)
    distance = (units[differ] * 128**0.5)[:, None] - torch.tensor(codec.BOUNDARIES)
    assert distance.abs().amin(-1).lt(TIE).all()
    assert_same_codes(codes, norms, expected_codes, expected_norms)
    read = tbq4.decode(codes, norms, 128, torch.float32)
    error = (read - x).square().sum(-1) / x.square().sum(-1)
    assert error.mean().item() == pytest.approx(0.0092, abs=2e-4)


def test_what_does_not_fit():
    x = torch.randn(1, 1, 6, 96, device="cuda")
    x[0, 0, 1] = 0
    for row, (channel, value) in enumerate([(70, math.nan), (3, math.inf), (3, 1e5), (80, 3e38)], start=2):
        x[0, 0, row, channel] = value
    (k_cache, k_scale), (v_cache, v_scale) = (cache((1, 1, 6), 96, "tbq4", x.dtype) for _ in range(2))
    ops.cache_write(k_cache, v_cache, x, x, torch.tensor(0, device="cuda"), None, k_scale, v_scale)
    lost = [[False, False]] * 2 + [[False, True], [True, False], [True, False], [False, True]]
    assert k_scale[0, 0].isnan().tolist() == v_scale[0, 0].isnan().tolist() == lost
    assert k_cache[0, 0, 1].eq(0x88).all()
    assert k_scale[0, 0, 1].eq(0).all()


def test_misaligned_after_aligned():
    """Vectors, codes and norms off by one element must not meet the kernel that was compiled for aligned ones."""
    x = torch.randn(2 * 2 * 128 + 8, device="cuda", dtype=torch.bfloat16)
    for shift in (0, 1, 3, 8):
        pool = torch.full((4 * 64 + 8,), UNTOUCHED, dtype=torch.uint8, device="cuda")
        norms = torch.full((4 + 8,), math.nan, dtype=torch.float16, device="cuda")
        k = x[shift:][:512].view(1, 2, 2, 128)
        codes, beside = pool[shift:][:256].view(1, 2, 2, 64), norms[shift:][:4].view(1, 2, 2, 1)
        v_cache, v_scale = torch.empty_like(codes), torch.empty_like(beside)
        ops.cache_write(codes, v_cache, k, k, torch.tensor(0, device="cuda"), None, beside, v_scale)
        assert_same_codes(codes, beside, *tbq4.encode(k.cpu()))
        assert torch.equal(v_cache, codes)
        assert pool[:shift].eq(UNTOUCHED).all()
        assert pool[shift + 256 :].eq(UNTOUCHED).all()
        assert norms.isnan().sum() == 8


def test_a_captured_graph_follows_the_positions():
    write = write_of(1, torch.bfloat16, paged=True, positions=torch.tensor(3, device="cuda"))
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
        assert_same_codes(write.k_cache, write.k_scale, expected.k_cache, expected.k_scale)
        assert_same_codes(write.v_cache, write.v_scale, expected.v_cache, expected.v_scale)


def test_encode_and_decode_on_the_device():
    """Whatever torch may do to float32 products."""
    x = torch.randn(2, 3, 50, 192, device="cuda", dtype=torch.bfloat16)
    expected = tbq4.encode(x.cpu())
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        found = tbq4.encode(x)
    finally:
        torch.set_float32_matmul_precision(before)
    assert_same_codes(*found, *expected)
    torch.testing.assert_close(
        tbq4.decode(*found, 192, torch.float32).cpu(), tbq4.decode(*(y.cpu() for y in found), 192, torch.float32)
    )
