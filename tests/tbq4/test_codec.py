"""The codec against the format's own words, spelled out in plain Python, and its known figures."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch import tbq4
from attnpatch.tbq4 import codec
from tests.tbq4.by_hand import encoded_by_hand, relative_error, rotated_by_hand

BLOCKS = {
    8: (8,),
    40: (32, 8),
    64: (64,),
    72: (64, 8),
    80: (64, 16),
    96: (64, 32),
    112: (64, 32, 16),
    120: (64, 32, 16, 8),
    128: (128,),
    192: (128, 64),
    256: (128, 128),
    320: (128, 128, 64),
}

LIVE_ERROR = {8: 0.0067, 16: 0.0077, 32: 0.0083, 64: 0.0089, 128: 0.0092}
"""Mean relative squared error of normal vectors; small blocks spend more on their norm."""


def test_signs():
    assert [int(signs, 16).bit_count() for signs in codec.SIGNS] == [60, 70]
    assert [codec._signs(which, 128)[:8].tolist() for which in (0, 1)] == [
        [-1, 1, 1, -1, -1, 1, -1, 1],  # 0x59, the lowest bit first
        [1, 1, 1, 1, -1, 1, 1, -1],  # 0x90
    ]


def test_levels_lie_next_to_the_best_ones():
    """Lloyd-Max of a normal distribution; the halves mirror each other."""
    best = torch.tensor([0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590])
    levels = torch.tensor(tbq4.LEVELS) * codec.LEVEL_SCALE
    torch.testing.assert_close(levels[8:], best, rtol=0.025, atol=0)
    assert torch.equal(levels[8:], -levels[:8].flip(0))
    assert math.log2(tbq4.STEP).is_integer()


@pytest.mark.parametrize(("head_dim", "blocks"), BLOCKS.items())
def test_blocks(head_dim, blocks):
    assert tbq4.blocks_of(head_dim) == blocks
    codes, norms = tbq4.encode(torch.randn(3, head_dim))
    assert codes.shape == (3, head_dim // 2)
    assert norms.shape == (3, len(blocks))


@pytest.mark.parametrize("head_dim", [0, -8, 4, 60, 129])
def test_head_dims_that_are_refused(head_dim):
    with pytest.raises(ValueError, match=rf"head_dim {head_dim} is not a positive multiple of 8.*dense or in 8 bits"):
        tbq4.blocks_of(head_dim)


def test_refused_vectors():
    with pytest.raises(ValueError, match="head_dim 60 is not"):
        tbq4.encode(torch.randn(2, 60))
    for dtype in (torch.int8, torch.float64):
        with pytest.raises(ValueError, match=rf"float16, bfloat16 and float32; got {dtype}"):
            tbq4.encode(torch.ones(2, 64, dtype=dtype))


def test_refused_codes():
    codes, norms = tbq4.encode(torch.randn(2, 80))
    with pytest.raises(ValueError, match=r"codes .*head_dim 64 must be torch.uint8 \(2, 32\); got .*\(2, 40\)"):
        tbq4.decode(codes, norms, 64, torch.float32)
    with pytest.raises(ValueError, match=r"norms .*must be torch.float16 \(2, 2\); got torch.float32"):
        tbq4.decode(codes, norms.float(), 80, torch.float32)
    with pytest.raises(ValueError, match=r"norms .*must be torch.float16 \(2, 2\); got torch.float16 \(2, 1\)"):
        tbq4.decode(codes, norms[:, :1], 80, torch.float32)
    with pytest.raises(ValueError, match=r"codes .*must be torch.uint8 .*; got torch.int8"):
        tbq4.decode(codes.view(torch.int8), norms, 80, torch.float32)


@pytest.mark.parametrize("head_dim", [8, 64, 96, 256])
def test_rotation(head_dim):
    """Orthogonal, no block reaches into another, and the way that it is documented."""
    r = tbq4.rotation(head_dim, torch.device("cpu"), torch.float64)
    torch.testing.assert_close(r @ r.T, torch.eye(head_dim, dtype=torch.float64))
    x = torch.randn(5, head_dim, dtype=torch.float64)
    y = tbq4.rotate(x)
    start = 0
    for n in tbq4.blocks_of(head_dim):
        block = slice(start, start + n)
        expected = torch.tensor([rotated_by_hand(row) for row in x[:, block].tolist()], dtype=torch.float64) / n**0.5
        torch.testing.assert_close(y[:, block], expected)
        start += n
    torch.testing.assert_close(x @ r.T, y)
    torch.testing.assert_close(tbq4.unrotate(y), x)
    assert tbq4.rotate(x.half()).dtype == torch.float16


@pytest.mark.parametrize("n", [8, 32, 128])
def test_encode_as_spelled_out(n):
    x = torch.randn(6, n, generator=torch.Generator().manual_seed(n))
    codes, norms = tbq4.encode(x)
    for row, byte, norm in zip(x.tolist(), codes.tolist(), norms[:, 0].tolist(), strict=True):
        expected, expected_norm = encoded_by_hand(row)
        assert byte == [low | high << 4 for low, high in zip(expected[::2], expected[1::2], strict=True)]
        assert norm == torch.tensor(expected_norm).half().item()


def test_decode_as_spelled_out():
    """Every code in both halves of a byte."""
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    norms = torch.tensor([[1.0], [0.5], [3.0], [0.0]], dtype=torch.float16)
    found = tbq4.decode(codes, norms, 128, torch.float32)
    r = tbq4.rotation(128, torch.device("cpu"), torch.float64)
    for row, bytes_, norm in zip(found, codes.tolist(), norms, strict=True):
        levels = [tbq4.LEVELS[code] for byte in bytes_ for code in (byte & 15, byte >> 4)]
        expected = r.T @ torch.tensor(levels, dtype=torch.float64) * norm / 512
        torch.testing.assert_close(row, expected.float())


def test_ties_go_to_the_higher_level():
    y = torch.tensor(codec.BOUNDARIES)
    assert codec.quantise(y, codec.BOUNDARIES).tolist() == list(range(1, 16))
    below = torch.nextafter(y, torch.tensor(-math.inf))
    assert codec.quantise(below, codec.BOUNDARIES).tolist() == list(range(15))
    assert codec.quantise(torch.tensor([0.0, -0.0, 9.0, -9.0]), codec.BOUNDARIES).tolist() == [8, 8, 15, 0]


def test_exact_zeros_of_the_rotation_are_ties():
    """e0 + e1 times signs: half of the sums cancel, to the bit."""
    x = torch.zeros(64)
    x[:2] = 0.7
    codes = codec.unpack(tbq4.encode(x)[0])
    zeros = torch.tensor([a == 0 for a in rotated_by_hand(x.tolist())])
    assert zeros.sum() == 32
    assert codes[zeros].eq(8).all()


@pytest.mark.parametrize("n", LIVE_ERROR)
def test_error_of_normal_vectors(n):
    x = torch.randn(12_000, n, generator=torch.Generator().manual_seed(n))
    found = tbq4.decode(*tbq4.encode(x), n, torch.float32)
    error = relative_error(found, x)
    assert error.mean().item() == pytest.approx(LIVE_ERROR[n], abs=2e-4)
    assert error.max() < 0.09
    torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1), rtol=5e-4, atol=0)
    if n == 128:
        assert torch.cosine_similarity(found, x).mean().item() == pytest.approx(0.9954, abs=2e-4)


def test_outliers_are_spread():
    """Two large channels, as keys have: plain 4 bits would leave nothing of the others."""
    x = torch.randn(500, 128)
    x[:, 3], x[:, 90] = 40, -30
    assert relative_error(tbq4.decode(*tbq4.encode(x), 128, torch.float32), x).mean() < 0.0095


def test_each_block_has_a_norm_of_its_own():
    """A head's blocks, and heads: what one holds changes nothing of the others."""
    x = torch.randn(2, 3, 192)
    codes, norms = tbq4.encode(x)
    x[1, 2, 128:] *= 1000
    x[0, 0] = 0
    changed_codes, changed_norms = tbq4.encode(x)
    assert torch.equal(changed_codes[1], codes[1])
    assert torch.equal(changed_norms[1, :2], norms[1, :2])
    assert changed_norms[1, 2, 0] == norms[1, 2, 0]
    torch.testing.assert_close(changed_norms[1, 2, 1], norms[1, 2, 1] * 1000, rtol=1e-3, atol=0)
    assert torch.equal(changed_codes[0, 1:], codes[0, 1:])
    assert changed_codes[0, 0].eq(0x88).all()


@pytest.mark.parametrize("head_dim", [8, 80, 128])
@pytest.mark.parametrize("length", [0.0, 1e-30, 9e-11])
def test_zeros(head_dim, length):
    x = torch.zeros(head_dim)
    x[0] = length
    codes, norms = tbq4.encode(x)
    assert codes.eq(0x88).all()
    assert norms.eq(0).all()
    assert tbq4.decode(codes, norms, head_dim, torch.float32).eq(0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e5, 3e38])
def test_what_does_not_fit_reads_back_as_nan(bad):
    x = torch.ones(3, 64)
    x[1, 5] = bad
    codes, norms = tbq4.encode(x)
    found = tbq4.decode(codes, norms, 64, torch.float32)
    assert found[1].isnan().all()
    assert found[::2].isfinite().all()
    if not bad < 1e18:
        assert codes[1].eq(0x88).all()


def test_one_bad_block_leaves_the_codes_of_the_others():
    x = torch.randn(1, 96)
    x[0, 70] = math.nan
    codes, norms = tbq4.encode(x)
    assert norms.isnan().tolist() == [[False, True]]
    assert not codes[0, :32].eq(0x88).all()
    assert codes[0, 32:].eq(0x88).all()


@settings(max_examples=80, deadline=None)
@given(
    head_dim=st.sampled_from([8, 16, 40, 64, 96, 128, 256]),
    exponent=st.floats(-4, 4),
    sparse=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_lengths_from_1e_4_to_1e4_survive(head_dim, exponent, sparse, seed):
    """Whatever the direction: normal, or all length in a few channels, before or after the rotation."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, head_dim, generator=generator)
    if sparse:
        x *= torch.rand(head_dim, generator=generator).argsort() < sparse
        x[:, 0] += 0.1
        x[2:] = tbq4.unrotate(x[2:])
    x *= 10**exponent / x.norm(dim=-1, keepdim=True)
    found = tbq4.decode(*tbq4.encode(x), head_dim, torch.float32)
    torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1), rtol=5.1e-4, atol=0)
    assert torch.cosine_similarity(found, x).min() > 0.7  # worst where few channels hold a rotated block: levels end


@settings(max_examples=80, deadline=None)
@given(
    outer=st.lists(st.integers(0, 3), max_size=3),
    head_dim=st.sampled_from([8, 24, 64, 80, 128, 192]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    strided=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_dtype(outer, head_dim, dtype, strided, seed):
    """Rows are encoded one by one, whatever lies around them."""
    x = torch.randn(*outer, head_dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if strided:
        x = torch.stack((x, torch.full_like(x, math.nan)), dim=-1)[..., 0]
    codes, norms = tbq4.encode(x)
    assert (codes.dtype, codes.shape) == (torch.uint8, (*outer, head_dim // 2))
    assert (norms.dtype, norms.shape) == (torch.float16, (*outer, len(tbq4.blocks_of(head_dim))))
    found = tbq4.decode(codes, norms, head_dim, dtype)
    assert (found.dtype, found.shape) == (dtype, x.shape)
    rows = x.reshape(-1, head_dim)
    for i in range(len(rows)):
        row = tbq4.encode(rows[i].float())
        assert torch.equal(codes.reshape(-1, head_dim // 2)[i], row[0])
        assert torch.equal(norms.reshape(len(rows), -1)[i], row[1])
    assert not len(rows) or relative_error(found.float(), x.float()).max() < 0.09


def test_tf32_does_not_reach_the_codes():
    x = torch.randn(200, 128)
    codes, norms = tbq4.encode(x)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        again = tbq4.encode(x)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(codes, again[0])
    assert torch.equal(norms, again[1])


def test_dynamo_traces_it_whole():
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm

    def there_and_back(x):
        return tbq4.decode(*tbq4.encode(x), x.shape[-1], x.dtype)

    compiled = torch.compile(there_and_back, backend=keep, fullgraph=True, dynamic=False)
    for head_dim in (96, 128):
        x = torch.randn(2, 3, head_dim)
        assert torch.equal(compiled(x), there_and_back(x))
    constants = [node.target for gm in graphs for node in gm.graph.nodes if node.op == "get_attr"]
    assert any("rotation" in name for name in constants)
    assert all(node.op != "placeholder" or node.name == "l_x_" for gm in graphs for node in gm.graph.nodes)
