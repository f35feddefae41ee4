"""Caches of TBQ4 are encoded while they are written: the kernel in the interpreter against attnpatch.tbq4.encode."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch import ops, tbq4
from attnpatch.kernels.cache_write import launch, reference
from attnpatch.tbq4 import codec
from attnpatch.writing import CacheWrite, check
from tests.kernels.test_cache_write import assert_same_write, bits

pytestmark = [  # numpy's, not a kernel's
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]

UNTOUCHED = 0xA5
TIE = 1e-5
"""How far from a boundary float32 may see a channel on its other side."""


def caches(outer, width, kind, dtype):
    """A poisoned cache of "tbq4", "int8" or "dense", and what stands beside it."""
    if kind == "dense":
        return torch.full((*outer, width), math.nan, dtype=dtype), None
    if kind == "int8":
        return torch.full((*outer, width), -128, dtype=torch.int8), torch.full(outer, math.nan)
    norms = torch.full((*outer, len(tbq4.blocks_of(width))), math.nan, dtype=torch.float16)
    return torch.full((*outer, width // 2), UNTOUCHED, dtype=torch.uint8), norms


def write_of(k, v, positions, rows=12, kinds=("tbq4", "tbq4"), table=None, pages=None):
    outer = (pages or len(k), k.shape[1], rows)
    k_cache, k_scale = caches(outer, k.shape[3], kinds[0], k.dtype)
    v_cache, v_scale = caches(outer, v.shape[3], kinds[1], v.dtype)
    return CacheWrite(k_cache, v_cache, k, v, torch.as_tensor(positions), table, k_scale, v_scale)


def vectors(*shape, dtype=torch.float32, seed=0):
    """Normal ones of lengths from 1e-3 to 1e3, some zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[2])[:, None]
    x[:, ::2, 1:3] = 0
    return x.to(dtype)


def copied(write):
    return CacheWrite(*(None if x is None else x.clone(memory_format=torch.preserve_format) for x in write))


def test_reference_against_encode():
    k, v = vectors(2, 3, 4, 80), vectors(2, 3, 4, 64, seed=1)
    write = write_of(k, v, [[3, 1, 0, 11], [0, 2, 4, 6]])
    reference.cache_write(*write)
    for x, cache, norms in ((k, write.k_cache, write.k_scale), (v, write.v_cache, write.v_scale)):
        expected_codes, expected_norms = tbq4.encode(x)
        for b in range(2):
            rows = write.positions[b]
            assert torch.equal(cache[b][:, rows], expected_codes[b])
            assert torch.equal(norms[b][:, rows], expected_norms[b])
            others = [row for row in range(12) if row not in rows.tolist()]
            assert cache[b][:, others].eq(UNTOUCHED).all()
            assert norms[b][:, others].isnan().all()


SHAPES = {
    torch.float32: [((8, 16), 1), ((192, 40), 1), ((256, 120), 2), ((128, 128), 4), ((64, 96), 5)],
    torch.float16: [((40, 64), 1), ((128, 128), 1), ((64, 96), 2), ((192, 40), 4), ((8, 16), 5), ((256, 120), 5)],
}


@pytest.mark.parametrize(
    ("dtype", "width", "tokens"), [(t, *shape) for t, shapes in SHAPES.items() for shape in shapes], ids=str
)
def test_shapes(dtype, width, tokens):
    k, v = (vectors(1, 2, tokens, n, dtype=dtype, seed=n) for n in width)
    ours = assert_same_write(write_of(k, v, 2))
    read = tbq4.decode(ours.k_cache, ours.k_scale, width[0], torch.float32)[:, :, 2 : 2 + tokens]
    torch.testing.assert_close(read.norm(dim=-1), k.float().norm(dim=-1), rtol=6e-4, atol=0)
    assert (torch.cosine_similarity(read, k.float(), dim=-1) > 0.95)[k.any(-1)].all()


@pytest.mark.parametrize("k_kind", ["tbq4", "int8", "dense"])
@pytest.mark.parametrize("v_kind", ["tbq4", "int8", "dense"])
def test_sides_are_independent(k_kind, v_kind):
    k, v = vectors(2, 1, 5, 64), vectors(2, 1, 5, 24, seed=1)
    ours = assert_same_write(write_of(k, v, 3, kinds=(k_kind, v_kind)))
    alone = assert_same_write(write_of(k, k, 3, kinds=(k_kind, "dense")))
    assert torch.equal(bits(ours.k_cache), bits(alone.k_cache))
    assert (ours.k_scale is None) == (k_kind == "dense")


POSITIONS = {
    "one, int32": torch.tensor(3, dtype=torch.int32),
    "per sequence": [[11, 0, 3, 7, 5], [1, 2, 3, 4, 0]],
    "some outside": [-1, 5, 12, -(2**40), 2**40],
    "all outside": 12,
    "run past the end": 10,
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_positions(positions):
    ours = assert_same_write(write_of(vectors(2, 1, 5, 8), vectors(2, 1, 5, 16), positions))
    p = torch.as_tensor(positions)
    p = p + torch.arange(5) if p.dim() == 0 else p
    inside = ((p >= 0) & (p < 12)).expand(2, 5).sum()
    assert (~ours.k_scale.isnan()).sum() == inside


@pytest.mark.parametrize("positions", [4, [[9, 4, 11, 12, -1], [4, 7, 6, 5, 8]]], ids=["one", "per sequence"])
def test_pages(positions):
    """The pool's own rows, and ids outside of it left out."""
    table = torch.tensor([[7, 2, 5], [1, 8, 9]], dtype=torch.int32)
    ours = assert_same_write(
        write_of(vectors(2, 2, 5, 40), vectors(2, 2, 5, 8), positions, rows=4, table=table, pages=9)
    )
    assert (~ours.k_scale[:, 0, :, 0].isnan()).sum() in (7, 9)
    assert ours.k_scale[[0, 3, 4, 6]].isnan().all()


def test_strides():
    """New tokens out of one projection into views of one larger cache; what lies between stays."""
    fused = vectors(2, 4, 3, 96).transpose(1, 2).contiguous().transpose(1, 2)
    k, v = fused.split([64, 32], dim=-1)
    pool = torch.full((2, 9, 4, 100), UNTOUCHED, dtype=torch.uint8)
    norms = torch.full((2, 9, 4, 4), math.nan, dtype=torch.float16)
    by_head, norms_by_head = pool.transpose(1, 2), norms.transpose(1, 2)
    views = by_head[..., 4:36], by_head[..., 40:72:2]
    write = CacheWrite(*views, k, v, torch.tensor(5), None, norms_by_head[..., 1:2], norms_by_head[..., 3:])
    launch.cache_write(write)(*write)
    plain = assert_same_write(write_of(k, v, 5, rows=9))
    for x, y in zip((*write[:2], *write[6:]), (*plain[:2], *plain[6:]), strict=True):
        assert torch.equal(bits(x), bits(y))
    pool[..., 4:36] = pool[..., 40:72:2] = UNTOUCHED
    assert pool.eq(UNTOUCHED).all()
    assert norms[..., [0, 2]].isnan().all()


def test_zeros_and_what_does_not_fit():
    x = torch.randn(1, 1, 7, 96)
    x[0, 0, 1] = 0
    x[0, 0, 2, 70] = math.nan
    x[0, 0, 3, 3] = math.inf
    x[0, 0, 4, 3] = 1e5
    x[0, 0, 5, 80] = 3e38
    x[0, 0, 6, :64] = 1e-20
    ours = assert_same_write(write_of(x, x, 0, rows=7))
    lost = [[False, False]] * 2 + [[False, True], [True, False], [True, False], [False, True], [False, False]]
    assert ours.k_scale[0, 0].isnan().tolist() == lost
    assert ours.k_cache[0, 0, 1].eq(0x88).all()
    assert ours.k_scale[0, 0, 1].eq(0).all()
    assert ours.k_cache[0, 0, 6, :32].eq(0x88).all()
    assert ours.k_scale[0, 0, 6].ne(0).tolist() == [False, True]


def on_boundaries(rows):
    """Blocks of which 120 channels of 128, rotated, lie on boundaries but for rounding."""
    generator = torch.Generator().manual_seed(0)
    middle = torch.tensor(codec.BOUNDARIES[2:-2], dtype=torch.float64)
    y = middle[torch.randint(len(middle), (rows, 128), generator=generator)]
    y[:, 120:] = ((128 - y[:, :120].square().sum(-1, keepdim=True)) / 8).sqrt()
    return tbq4.unrotate(y).float().view(1, 1, rows, 128)


def test_codes_differ_at_boundaries_alone():
    """Float32 sees a channel on the other side only where it lies within rounding of a boundary."""
    x = torch.cat((on_boundaries(30), torch.randn(1, 1, 60, 128)), dim=2)
    write = write_of(x, x[..., :8], 0, rows=90)
    ours, expected = copied(write), copied(write)
    launch.cache_write(ours)(*ours)
    reference.cache_write(*expected)
    units, _ = codec.rotated_units(x)
    distance = (units * 128**0.5)[..., None].sub(torch.tensor(codec.BOUNDARIES)).abs().amin(-1)
    differ = codec.unpack(ours.k_cache) != codec.unpack(expected.k_cache)
    assert differ.any()
    assert distance[differ].max() < TIE
    same = ~differ.any(-1, keepdim=True)
    torch.testing.assert_close(ours.k_scale[same], expected.k_scale[same], rtol=1e-3, atol=0)


def test_the_operator_writes_tbq4():
    """On the CPU, eagerly and in a graph, in one call."""
    k, v = vectors(2, 2, 3, 64), vectors(2, 2, 3, 128)
    eager, compiled, expected = (write_of(k, v, 4) for _ in range(3))
    assert ops.cache_write(*eager) is None
    torch.compile(lambda *write: ops.cache_write(*write), fullgraph=True, backend="aot_eager")(*compiled)
    reference.cache_write(*expected)
    for x, y, z in zip(eager, compiled, expected, strict=True):
        assert x is None or (torch.equal(bits(x), bits(z)) and torch.equal(bits(y), bits(z)))


BAD = {
    "half as many bytes": (lambda w: w._replace(k_cache=w.k_cache[..., :16]), r"k has 2 heads of width 64.*32 \(two"),
    "head_dim": (
        lambda w: w._replace(k=w.k[..., :60], k_cache=w.k_cache[..., :30]),
        "head_dim 60 is not a positive multiple of 8",
    ),
    "no norms": (lambda w: w._replace(k_scale=None), r"uint8 k_cache needs k_scale: float16 of shape \(2, 2, 12, 1\)"),
    "float32 norms": (
        lambda w: w._replace(v_scale=w.v_scale.float()),
        r"v_scale must be float16 .*; got torch.float32",
    ),
    "norms per token": (
        lambda w: w._replace(v_scale=w.v_scale[..., 0]),
        r"v_scale must be float16 of shape \(2, 2, 12, 2\), a norm per token, head and block of \(64, 32\); got",
    ),
    "float64": (lambda w: w._replace(k=w.k.double()), r"k must be float16, bfloat16 or float32 .*; got torch.float64"),
    "expanded norms": (
        lambda w: w._replace(v_scale=w.v_scale[..., :1].expand(2, 2, 12, 2)),
        "v_scale .* is expanded, and one write would reach several places",
    ),
}


@pytest.mark.parametrize(("broken", "message"), BAD.values(), ids=BAD)
def test_refused(broken, message):
    write = write_of(vectors(2, 2, 3, 64), vectors(2, 2, 3, 96), 0)
    check(write)
    with pytest.raises(ValueError, match=message):
        ops.cache_write(*broken(write))


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_anything(data):
    draw = data.draw
    batch, heads, tokens = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 6))
    widths = [draw(st.sampled_from([8, 16, 24, 64, 72])) for _ in range(2)]
    kinds = [draw(st.sampled_from(["tbq4", "tbq4", "int8", "dense"])) for _ in range(2)]
    dtype = draw(st.sampled_from([torch.float32, torch.float16]))
    seed = draw(st.integers(0, 100))
    spread = torch.randperm(9 + 2 * tokens, generator=torch.Generator().manual_seed(seed))[:tokens] - tokens
    positions = draw(st.sampled_from([spread[0], spread, spread.expand(batch, tokens)]))
    k, v = (vectors(batch, heads, tokens, n, dtype=dtype, seed=seed + i) for i, n in enumerate(widths))
    assert_same_write(write_of(k, v, positions, rows=9, kinds=kinds))
