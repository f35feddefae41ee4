"""The kernel that writes caches, in the interpreter, against the same in plain torch: every bit, and nothing else."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch.kernels.cache_write import launch, reference
from attnpatch.writing import CacheWrite, check

pytestmark = [  # numpy's, not a kernel's
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2


class Shape(NamedTuple):
    batch: int = 2
    heads: int = 3
    tokens: int = 5
    width: int = 8
    width_v: int = 8
    rows: int = 12
    """Capacity, or the size of a page."""
    pages: int = 0
    blocks: int = 0


def poison(*shape, dtype=torch.float32):
    if dtype == INT8:
        return torch.full(shape, -128, dtype=dtype)  # no vector rounds to it
    return torch.full(shape, math.nan).to(dtype)


def swapped(*shape, dtype=torch.float32):
    """``[B, H, n, ...]`` as a view of ``[B, n, H, ...]``."""
    return poison(shape[0], shape[2], shape[1], *shape[3:], dtype=dtype).transpose(1, 2)


def write_of(s, positions, dtype=torch.float32, caches=(None, None), table=None, empty=poison, seed=0):
    """A write of random vectors, some of them zero, to poisoned caches; ``caches`` are dtypes, None = that of k."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(s.batch, s.tokens, s.heads, s.width + s.width_v, generator=generator).to(dtype)
    fused[:, ::3, 1:] = 0
    k, v = fused.transpose(1, 2).split([s.width, s.width_v], dim=-1)
    outer = (s.pages or s.batch, s.heads, s.rows)
    k_cache, v_cache = (empty(*outer, n, dtype=c or dtype) for n, c in zip((s.width, s.width_v), caches, strict=True))
    scales = [None if c is None else empty(*outer) for c in caches]
    return CacheWrite(k_cache, v_cache, k, v, torch.as_tensor(positions), table, *scales)


def copied(write):
    """The same write to caches of its own, in the very strides."""
    return CacheWrite(*(None if x is None else x.clone(memory_format=torch.preserve_format) for x in write))


def bits(x):
    return x.contiguous().flatten().view(torch.uint8)


def assert_same_write(write):
    """The kernel leaves every bit of caches and scales as the reference does, the untouched ones too."""
    check(write)
    ours, expected = copied(write), copied(write)
    launch.cache_write(ours)(*ours)
    reference.cache_write(*expected)
    for name, x, y in zip(write._fields, ours, expected, strict=True):
        assert x is None or torch.equal(bits(x), bits(y)), name
    return ours


def test_reference_dense():
    """Against index assignment spelled out."""
    s = Shape()
    write = write_of(s, [[3, 1, 0, 11, 4], [0, 2, 4, 6, 8]])
    reference.cache_write(*write)
    for b in range(s.batch):
        for t in range(s.tokens):
            row = write.positions[b, t]
            assert torch.equal(write.k_cache[b, :, row], write.k[b, :, t])
            assert torch.equal(write.v_cache[b, :, row], write.v[b, :, t])
    assert write.k_cache.isnan().sum() == s.batch * s.heads * (s.rows - s.tokens) * s.width


def test_reference_pages():
    s = Shape(rows=4, pages=9, blocks=3)
    table = torch.tensor([[7, 2, 5], [1, 8, 3]])
    write = write_of(s, 2, table=table)
    reference.cache_write(*write)
    for b in range(s.batch):
        for t in range(s.tokens):
            page, row = table[b, (2 + t) // 4], (2 + t) % 4
            assert torch.equal(write.k_cache[page, :, row], write.k[b, :, t])
            assert torch.equal(write.v_cache[page, :, row], write.v[b, :, t])
    assert write.v_cache.isnan().sum() == (s.pages * s.rows - s.batch * s.tokens) * s.heads * s.width_v


@pytest.mark.parametrize("dtype", [INT8, E4M3, E5M2], ids=str)
def test_reference_quantises(dtype):
    x = torch.randn(50, 16) * torch.logspace(-6, 6, 50)[:, None]
    x[3] = 0
    codes, scale = reference.quantised(x, dtype)
    limit = 127 if dtype == INT8 else torch.finfo(dtype).max
    assert codes.float().abs().amax(-1).eq(limit)[x.any(-1)].all()
    assert (scale[3], codes[3].float().abs().max()) == (1, 0)
    step = 0.5 if dtype == INT8 else codes.float().abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).tiny
    assert ((x / scale[:, None] - codes.float()).abs() <= step * (1 + 1e-6)).all()


def test_ties_round_to_even():
    """And 2.5 is a tie: 127 makes the scale 1."""
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]]).view(1, 1, 1, 8)
    write = CacheWrite(poison(1, 1, 1, 8, dtype=INT8), poison(1, 1, 1, 8), x, x, torch.tensor(0), None, poison(1, 1, 1))
    ours = assert_same_write(write)
    assert ours.k_cache.flatten().tolist() == [127, 0, 2, 2, 0, -2, -2, 126]
    assert ours.k_scale.item() == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reads_back_as_nan(bad):
    x = torch.ones(1, 1, 2, 8)
    x[0, 0, 1, 3] = bad
    scales = poison(2, 1, 1, 2).unbind()
    caches = (poison(1, 1, 2, 8, dtype=INT8) for _ in range(2))
    ours = assert_same_write(CacheWrite(*caches, x, x, torch.tensor(0), None, *scales))
    read = ours.k_cache.float() * ours.k_scale[..., None]
    assert read[0, 0, 0].isfinite().all()
    assert read[0, 0, 1].isnan().all()


def test_vectors_too_small_for_a_scale():
    x = torch.full((1, 1, 1, 8), 1e-44)  # over 127, nothing is left
    caches = (poison(1, 1, 1, 8, dtype=INT8) for _ in range(2))
    ours = assert_same_write(CacheWrite(*caches, x, x, torch.tensor(0), None, *poison(2, 1, 1, 1).unbind()))
    assert (ours.k_scale.item(), ours.k_cache.any().item()) == (1, False)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_floats_of_8_bits(dtype):
    """Values that need no rounding: the interpreter's casts do not round to nearest."""
    limit = torch.finfo(dtype).max
    x = torch.tensor([limit, 1.0, -2.0, 0.5, 0.0, -limit, 8.0, -0.25]).expand(2, 3, 5, 8).contiguous()
    x *= torch.tensor([1.0, 2.0, 0.25, 0.0, 64.0])[:, None]
    caches = (swapped(2, 3, 12, 8, dtype=dtype) for _ in range(2))
    write = CacheWrite(*caches, x, -x, torch.tensor([4, 3, 9, 0, 11]), None, swapped(2, 3, 12), poison(2, 3, 12))
    ours = assert_same_write(write)
    read = ours.k_cache.float() * ours.k_scale[..., None]
    assert torch.equal(read[:, :, write.positions], x)
    assert ours.k_scale.isnan().sum() == 2 * 3 * 7


POSITIONS = {
    "one": 3,
    "one, int32": torch.tensor(3, dtype=torch.int32),
    "per token": [11, 0, 3, 7, 5],
    "per sequence": [[11, 0, 3, 7, 5], [1, 2, 3, 4, 0]],
    "strided": torch.arange(20).reshape(10, 2).T[:, ::2],
    "some outside": [-1, 5, 12, -(2**40), 2**40],
    "all outside": 12,
    "run past the end": 10,
    "begin before the start": -2,
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("empty", [poison, swapped])
def test_positions(positions, empty):
    s = Shape()
    ours = assert_same_write(write_of(s, positions, empty=empty))
    assert_same_write(write_of(s, positions, caches=(INT8, None), empty=empty))
    p = torch.as_tensor(positions)
    p = p + torch.arange(s.tokens) if p.dim() == 0 else p
    inside = ((p >= 0) & (p < s.rows)).expand(s.batch, s.tokens).sum()
    assert (~ours.k_cache.isnan()).sum() == inside * s.heads * s.width


TABLES = {
    "int64": torch.tensor([[7, 2, 5], [1, 8, 3]]),
    "int32, strided": torch.tensor([[7, 1], [2, 8], [5, 3]], dtype=torch.int32).T,
    "unused pages": torch.tensor([[7, -1, 5], [9, 8, 2**31]]),
    "one page for a prefix": torch.tensor([[0, 4, 5], [0, 8, 3]]),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("positions", [4, [[9, 4, 11, 12, -1], [4, 7, 6, 5, 8]]], ids=["one", "per sequence"])
def test_pages(positions, table):
    s = Shape(rows=4, pages=9, blocks=3)
    ours = assert_same_write(write_of(s, positions, table=table))
    assert not ours.k_cache.isnan().all()
    assert_same_write(write_of(s, positions, table=table, caches=(INT8, INT8), empty=swapped))


def test_ids_outside_the_pool_are_left_out():
    """What a clamp would write to the first or the last page."""
    s = Shape(batch=3, tokens=4, rows=4, pages=2, blocks=1)
    ours = assert_same_write(write_of(s, 0, table=torch.tensor([[-1], [2], [-(2**31)]])))
    assert ours.k_cache.isnan().all()
    assert ours.v_cache.isnan().all()


@pytest.mark.parametrize("tokens", [1, 2, 16, 17])
@pytest.mark.parametrize("width", [(1, 1), (16, 16), (80, 96), (24, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_shapes(dtype, width, tokens):
    s = Shape(1, 2, tokens, *width, rows=20)
    assert_same_write(write_of(s, 2, dtype))
    assert_same_write(write_of(s, 2, dtype, caches=(INT8, INT8)))


@pytest.mark.parametrize("s", [Shape(tokens=0), Shape(batch=0), Shape(rows=0)], ids=["tokens", "sequences", "rows"])
def test_nothing_to_write(s):
    ours = assert_same_write(write_of(s, 0))
    assert ours.k_cache.isnan().all()


def test_caches_inside_larger_tensors():
    """Every second row and every head but the last of larger caches; what lies between stays."""
    pool = poison(2, 2, 4, 24, 16)
    write = write_of(Shape(), [[0, 3, 4, 5, 9], [2, 1, 7, 8, 11]])
    inner = pool[:, :, :3, ::2, 4:12]
    launch.cache_write(write._replace(k_cache=inner[0], v_cache=inner[1]))(*inner, *write[2:])
    reference.cache_write(*write)
    assert torch.equal(inner[0].nan_to_num(9.0), write.k_cache.nan_to_num(9.0))
    assert torch.equal(inner[1].nan_to_num(9.0), write.v_cache.nan_to_num(9.0))
    assert (~pool.isnan()).sum() == 2 * 2 * 5 * 3 * 8


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_anything(data):
    draw = data.draw
    paged = draw(st.booleans())
    s = Shape(
        batch=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        tokens=draw(st.integers(1, 6)),
        width=draw(st.sampled_from([1, 3, 8, 16])),
        width_v=draw(st.sampled_from([1, 5, 8, 16])),
        rows=draw(st.integers(1, 9)),
        pages=draw(st.integers(1, 7)) if paged else 0,
        blocks=draw(st.integers(1, 4)) if paged else 0,
    )
    capacity = s.rows * (s.blocks or 1)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    kind = draw(st.sampled_from([(), (s.tokens,), (s.batch, s.tokens)]))
    spread = (
        torch.randperm(capacity + 2 * s.tokens, generator=generator)[: s.tokens] - s.tokens
    )  # distinct, some outside
    positions = {0: spread[0], 1: spread, 2: spread.expand(s.batch, s.tokens)}[len(kind)]
    table = None
    if paged:  # no page twice: which of two writes to one place stays is open
        ids = torch.randperm(max(s.pages, s.batch * s.blocks) + 2, generator=generator) - 1
        table = ids[: s.batch * s.blocks].reshape(s.batch, s.blocks)
    cache = st.sampled_from([None, INT8])
    assert_same_write(
        write_of(
            s,
            positions,
            draw(st.sampled_from([torch.float32, torch.float16])),
            (draw(cache), draw(cache)),
            table,
            draw(st.sampled_from([poison, swapped])),
        )
    )
