"""What resembles attention and is something else: refused with its reason or no site at all, and never changed."""

import pytest
import torch

from attnpatch.testing.recording import clones, record
from attnpatch.testing.tolerance import assert_same_function, run_float64

from . import lookalikes_softmax  # noqa: F401  enters its functions in REFUSED
from .disguises import EITHER_WAY
from .lookalikes import REFUSED, B, D, H, S
from .no_attention import NO_SITE
from .written_terms import WRITTEN


def qkv():
    return tuple(torch.randn(B, H, S, D) for _ in range(3))


def unchanged(function, *args):
    """The recording of ``function``; nothing is fused, and graph and output are bit for bit the original's."""
    torch.manual_seed(1)
    recording = record(function, *args)
    torch.manual_seed(1)
    expected = function(*clones(args))
    assert recording.masks == []
    assert recording.after == recording.before
    torch.testing.assert_close(recording.output, expected, rtol=0, atol=0, equal_nan=True)
    return recording


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize(("function", "reason"), REFUSED.items(), ids=[f.__name__ for f in REFUSED])
def test_refused(function, reason):
    assert reason in unchanged(function, *qkv()).reasons[0]


@pytest.mark.parametrize("function", NO_SITE, ids=[f.__name__ for f in NO_SITE])
def test_no_site(function):
    assert unchanged(function, *qkv()).sites == []


@pytest.mark.parametrize("function", WRITTEN, ids=[f.__name__ for f in WRITTEN])
def test_terms_written_after_they_were_read(function):
    assert_same_either_way(function)


@pytest.mark.parametrize("function", EITHER_WAY, ids=[f.__name__ for f in EITHER_WAY])
def test_attention_in_disguise(function):
    assert_same_either_way(function)


def assert_same_either_way(function):
    """What the compiled ``function`` returns is the same within rounding, with the same random numbers."""
    args, outputs = qkv(), []
    for run in (lambda f, *a: record(f, *a).output, lambda f, *a: f(*a), run_float64):
        torch.manual_seed(1)
        outputs.append(run(function, *clones(args)))
    assert_same_function(*outputs)
