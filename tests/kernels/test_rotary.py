"""Rotary embeddings in the interpreter and in plain torch, against float64."""

import re

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from attnpatch import rotary
from attnpatch.kernels.rotary import launch, reference
from attnpatch.testing.tolerance import assert_same_function

RUNS = {"triton": launch.rotary, "torch": reference.rotary}


def written(x, cos, sin):
    """As models write it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def arguments(shape, dtype, generator, angles_shape=None):
    angles = torch.randn(angles_shape or shape, generator=generator)
    return [t.to(dtype) for t in (torch.randn(shape, generator=generator), angles.cos(), angles.sin())]


def check(run, *xs, cos, sin):
    for x, found in zip(xs, run(xs, cos, sin), strict=True):
        assert (found.shape, found.dtype, found.stride()) == (x.shape, x.dtype, torch.empty_like(x).stride())
        assert_same_function(found, written(x, cos, sin), written(x.double(), cos.double(), sin.double()))


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_shapes_and_strides(run, dtype, data):
    """Two sines of a pair need not be equal; cos and sin broadcast; rows lie in any order, and between others."""
    draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    shape = [draw(1, 2), draw(1, 3, 5), draw(1, 7), 2 * draw(1, 3, 16, 40)]
    broadcast = [draw(1, size) for size in shape[:3]]
    x, cos, sin = arguments(shape, dtype, generator, [*broadcast, shape[3]])
    if data.draw(st.booleans()):
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    if data.draw(st.booleans()):
        x = torch.cat((x, torch.full_like(x, torch.nan)), dim=-1)[..., : shape[3]]
    xs = [x]
    if data.draw(st.booleans()):  # keys of fewer heads, whose rows lie otherwise
        xs.append(
            torch.randn(shape[3], shape[2], broadcast[1], shape[0], generator=generator).permute(3, 2, 1, 0).to(dtype)
        )
    check(run, *xs, cos=cos[0] if broadcast[0] == 1 else cos, sin=sin)


def test_many_rows_share_a_program():
    x, cos, sin = arguments([1, 3, 700, 6], torch.float32, torch.Generator().manual_seed(0), [1, 1, 700, 6])
    assert x.numel() // 6 > launch.FEW
    check(launch.rotary, x, x[:, :1], cos=cos, sin=sin)


def test_nothing():
    x = torch.zeros(1, 0, 3, 8)
    assert launch.rotary([x], torch.zeros(3, 8), torch.zeros(3, 8))[0].shape == x.shape
    _, found = launch.rotary([x, torch.ones(1, 2, 3, 8)], torch.ones(3, 8), torch.zeros(3, 8))
    assert found.eq(1).all()


EVEN = "x of rotary must be [a, b, c, channels], channels even and of one number; got "
BAD = {
    EVEN + "(1, 2, 3, 5)": [(1, 2, 3, 5), (3, 5), (3, 5)],
    EVEN + "(3, 4)": [(3, 4), (3, 4), (3, 4)],
    "cos of rotary does not broadcast to x (1, 2, 3, 4); got (2, 4)": [(1, 2, 3, 4), (2, 4), (3, 4)],
    "sin of rotary does not broadcast to x (1, 2, 3, 4); got (1, 1, 1, 3, 4)": [(1, 2, 3, 4), (3, 4), (1, 1, 1, 3, 4)],
}


@pytest.mark.parametrize(("message", "shapes"), BAD.items())
def test_bad_shapes(message, shapes):
    x, cos, sin = map(torch.zeros, shapes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        rotary.rotary([x], cos, sin)


def test_bad_dtype_and_device():
    x, angles = torch.zeros(1, 1, 1, 4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"cos of rotary must be float16, bfloat16 or float32; got torch\.float64"):
        rotary.rotary([x], angles.double(), angles)
    with pytest.raises(ValueError, match="sin of rotary is on meta, x on cpu; it needs all on one device"):
        rotary.check([x], angles, angles.to("meta"))


def test_other_channels_and_numbers():
    x, angles = torch.zeros(1, 1, 1, 4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"of one number; got \(1, 1, 1, 4\), \(1, 1, 1, 2\)"):
        rotary.rotary([x, x[..., :2]], angles, angles)
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"rotary turns one or two tensors; got {count}"):
            rotary.check([x] * count, angles, angles)


def test_the_operator():
    x, cos, sin = arguments([2, 3, 5, 8], torch.bfloat16, torch.Generator().manual_seed(1), [2, 1, 5, 8])
    check(rotary.rotary, x, x[:, 1:], cos=cos, sin=sin)
    torch.library.opcheck(torch.ops.attnpatch.rotary.default, ([x, x[:, 1:]], cos, sin))
