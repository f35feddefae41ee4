"""66-byte blocks: every byte as the format says, and conversion to the live format and back."""

import math
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch import tbq4
from attnpatch.tbq4 import blocks66, codec
from tests.tbq4.by_hand import block_by_hand, relative_error

WAVE = torch.tensor([math.sin(i) + i / 64 for i in range(128)])
WAVE_BLOCK = (
    "bf4b594345b51489ca8975dc749a5b562927d5450d24b454d6a235502747897752"
    "e797594b454664452e24a368a5a4db33359a587948d899dc969494a8399696acda"
)


def fields(data):
    """Norms as whole numbers and code bytes of blocks."""
    blocks = np.frombuffer(data, np.uint8).reshape(-1, 66)
    return blocks[:, :2].copy().view(np.int16).astype(int)[:, 0], blocks[:, 2:]


def test_known_block():
    data = tbq4.export_blocks(WAVE)
    assert data == block_by_hand(WAVE.tolist())
    assert data.hex() == WAVE_BLOCK


def test_blocks_as_spelled_out():
    x = torch.randn(7, 128) * torch.logspace(-3, 3, 7)[:, None]
    assert tbq4.export_blocks(x) == b"".join(map(block_by_hand, x.tolist()))


def test_rows_lie_one_behind_the_other():
    x = torch.randn(2, 3, 256)
    data = tbq4.export_blocks(x)
    assert len(data) == 2 * 3 * 2 * 66
    assert data == b"".join(tbq4.export_blocks(block) for block in x.reshape(-1, 128))
    assert data == tbq4.export_blocks(x.transpose(0, 1).contiguous().transpose(0, 1))


def test_one_hot():
    """One channel before the rotation: all of one magnitude after it, and d is float16's next to 1.0605."""
    x = torch.eye(128)
    norms, codes = fields(tbq4.export_blocks(x))
    assert (norms == 0x3C3E).all()
    assert set((codes & 15).flat) == set((codes >> 4).flat) == {4, 11}
    found = tbq4.import_blocks(tbq4.export_blocks(x), (128, 128))
    assert relative_error(found, x).max() < 2e-7


def test_zeros():
    data = tbq4.export_blocks(torch.zeros(2, 128))
    assert data == (b"\0\0" + b"\x88" * 64) * 2
    assert tbq4.import_blocks(data, (2, 128)).eq(0).all()


def test_ones():
    x = torch.ones(1, 128)
    found = tbq4.import_blocks(tbq4.export_blocks(x), (1, 128))
    assert relative_error(found, x).item() == pytest.approx(0.00677, abs=1e-5)


def test_boundaries_are_the_middles_and_ties_go_up():
    middles = [(low + high) / 2 for low, high in pairwise(blocks66.CENTROIDS)]
    assert pytest.approx(middles, abs=6e-7) == blocks66.BOUNDARIES
    assert blocks66.CENTROIDS[0] == -0.241556
    y = torch.tensor(blocks66.BOUNDARIES)
    assert codec.quantise(y, blocks66.BOUNDARIES).tolist() == list(range(1, 16))


def test_error_of_normal_vectors():
    x = torch.randn(12_000, 128)
    found = tbq4.import_blocks(tbq4.export_blocks(x), tuple(x.shape))
    error = relative_error(found, x)
    assert error.mean().item() == pytest.approx(0.0092, abs=2e-4)
    assert error.max() < 0.06
    torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1), rtol=5e-4, atol=0)


def test_import_reads_every_code_in_both_halves():
    codes = bytes(range(256))
    data = b"".join(struct.pack("<e", d) + codes[64 * i : 64 * i + 64] for i, d in enumerate((1, 0.25, -2, 0)))
    found = tbq4.rotate(tbq4.import_blocks(data, (2, 256)).view(4, 128))
    for row, start, d in zip(found, range(0, 256, 64), (1, 0.25, -2, 0), strict=True):
        wanted = [d * blocks66.CENTROIDS[code] for byte in range(start, start + 64) for code in (byte & 15, byte >> 4)]
        torch.testing.assert_close(row, torch.tensor(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_there_and_back_changes_no_byte(dtype):
    x = torch.randn(300, 128).to(dtype)
    data = tbq4.export_blocks(x)
    assert tbq4.export_blocks(tbq4.import_blocks(data, (300, 128))) == data


@settings(max_examples=60, deadline=None)
@given(data=st.binary(min_size=64, max_size=64), d=st.floats(1 / 128, 32, width=16), negative=st.booleans())
def test_any_codes_convert_without_a_change(data, d, negative):
    block = struct.pack("<e", -d if negative else d) + data
    codes, norms = tbq4.from_blocks(block, (128,))
    assert codes.numpy().tobytes() == data
    again = tbq4.to_blocks(codes, norms)
    assert again[2:] == data
    assert abs(fields(again)[0] - fields(block)[0]).max() <= 1
    found, expected = tbq4.decode(codes, norms, 128, torch.float32), tbq4.import_blocks(block, (128,))
    torch.testing.assert_close(found.norm(), expected.norm(), rtol=1e-3, atol=0)
    assert torch.cosine_similarity(found, expected, dim=0) > 0.9998


def test_conversion_of_a_cache():
    """The 0.3 % between the tables, and nothing of it in the lengths."""
    x = torch.randn(2, 3, 50, 256)
    data = tbq4.export_blocks(x)
    codes, norms = tbq4.from_blocks(data, tuple(x.shape))
    assert (codes.shape, norms.shape) == ((2, 3, 50, 128), (2, 3, 50, 2))
    found, reference = tbq4.decode(codes, norms, 256, torch.float32), tbq4.import_blocks(data, tuple(x.shape))
    assert relative_error(found, reference).mean().sqrt().item() == pytest.approx(0.0033, abs=5e-4)
    assert relative_error(found, x).mean().item() == pytest.approx(0.0092, abs=2e-4)
    torch.testing.assert_close(found.norm(dim=-1), reference.norm(dim=-1), rtol=1e-3, atol=0)
    assert (fields(tbq4.to_blocks(codes, norms))[1] == fields(data)[1]).all()


def test_blocks_that_are_not_finite():
    x = torch.randn(3, 128)
    x[1, 7] = math.nan
    codes, norms = tbq4.from_blocks(tbq4.export_blocks(x), (3, 128))
    assert norms.isnan().flatten().tolist() == [False, True, False]
    again = tbq4.import_blocks(tbq4.to_blocks(codes, norms), (3, 128))
    assert again.isnan().all(-1).tolist() == again.isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("width", [0, 64, 192])
def test_refused_widths(width):
    with pytest.raises(ValueError, match=rf"hold 128 channels each; .*\(2, {width}\) is no multiple .*tbq4.encode"):
        tbq4.export_blocks(torch.randn(2, width))
    with pytest.raises(ValueError, match="hold 128 channels each"):
        tbq4.import_blocks(b"", (2, width))
    with pytest.raises(ValueError, match="hold 128 channels each"):
        tbq4.from_blocks(b"", ())


def test_refused_data():
    with pytest.raises(ValueError, match=r"shape \(3, 128\) are 198 bytes, 66 per 128 channels; got 132"):
        tbq4.import_blocks(bytes(132), (3, 128))
    with pytest.raises(ValueError, match=r"float16, bfloat16 and float32; got torch.float64"):
        tbq4.export_blocks(torch.zeros(128, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"norms .* must be torch.float16"):
        tbq4.to_blocks(torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="hold 128 channels each"):
        tbq4.to_blocks(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.float16))
