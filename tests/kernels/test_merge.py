"""Two attentions on different keys as one, in the interpreter and in plain torch, against float64."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from attnpatch import merging
from attnpatch.attention_call import new_output
from attnpatch.kernels.merge import launch, reference
from attnpatch.testing.tolerance import assert_same_function

RUNS = {"triton": launch.merge, "torch": reference.merge}


def written(o, lse, other, other_lse, sinks):
    """As a softmax over the denominators; of a row that sees no key, zeros."""
    sinks = torch.full_like(lse, -torch.inf) if sinks is None else sinks[:, None].expand_as(lse)
    scores = torch.stack((lse, other_lse, sinks), -1)
    seen = (scores[..., :2] > -torch.inf).any(-1)
    weights = torch.softmax(torch.where(seen[..., None], scores, 0.0), -1)[..., :2] * seen[..., None]
    total = torch.where(seen, torch.logsumexp(scores, -1), -torch.inf)
    return (o * weights[..., :1] + other * weights[..., 1:]).to(o.dtype), total


def arguments(shape, dtype, seed=0, sinks=False, strided=False):
    generator = torch.Generator().manual_seed(seed)
    o, other = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    lse, other_lse = (torch.randn(shape[:3], generator=generator) * 5 for _ in range(2))
    hidden, other_hidden = (torch.rand(shape[:3], generator=generator) < 0.3 for _ in range(2))
    lse[hidden], other_lse[other_hidden] = -torch.inf, -torch.inf
    o[hidden], other[other_hidden] = 0, 0
    o = o.transpose(1, 2).contiguous().transpose(1, 2) if strided else o
    return o, lse, other, other_lse, torch.randn(shape[1], generator=generator) if sinks else None


def check(run, given):
    o, lse = run(*given)
    own, own_lse = written(*given)
    y64, lse64 = written(*(None if x is None else x.double() for x in given))
    assert (o.dtype, o.stride()) == (given[0].dtype, new_output(given[0], given[0]).stride())
    assert_same_function(o, own, y64)
    seen = lse64 > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert_same_function(lse[seen], own_lse[seen], lse64[seen])
    assert not o[~seen].any()


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_shapes(run, dtype, data):
    shape = [data.draw(st.sampled_from(sizes)) for sizes in ((1, 2), (1, 3), (1, 5), (8, 80, 128))]
    check(run, arguments(shape, dtype, *(data.draw(x) for x in (st.integers(0, 9), st.booleans(), st.booleans()))))


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_large_denominators(run):
    """Their exponentials overflow alone."""
    o, lse, other, other_lse, sinks = arguments([1, 2, 3, 8], torch.float32, sinks=True)
    check(run, (o, lse + 1000, other, other_lse + 1000, sinks + 1000))
    check(run, (o, lse - 1000, other, other_lse - 1000, sinks - 1000))


def test_nothing():
    o, lse, *_ = arguments([1, 2, 0, 8], torch.float32)
    assert launch.merge(o, lse, o, lse, None)[0].shape == (1, 2, 0, 8)


def test_errors():
    o, lse, other, other_lse, _ = arguments([1, 2, 3, 8], torch.float32)
    with pytest.raises(ValueError, match=r"merge takes o .* got \(1, 2, 3, 8\) and torch\.float32 \(1, 2\)"):
        merging.merge(o, lse[:, :, 0], other, other_lse)
    with pytest.raises(
        ValueError, match=r"other of merge must be torch\.float32 \(1, 2, 3, 8\) on cpu; got torch\.float16"
    ):
        merging.merge(o, lse, other.half(), other_lse)
    with pytest.raises(ValueError, match=r"sinks of merge must be \[num_heads=2\] on cpu; got \(3,\)"):
        merging.merge(o, lse, other, other_lse, torch.zeros(3))


@pytest.mark.parametrize("sinks", [False, True])
def test_operator(sinks):
    given = arguments([2, 3, 4, 16], torch.float32, sinks=sinks)
    check(merging.merge, given)
    torch.library.opcheck(torch.ops.attnpatch.merge.default, given)
