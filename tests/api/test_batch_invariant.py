"""The option batch_invariant, from every way in to the call that a backend gets."""

import pytest
import torch
from torch import nn

import attnpatch
from attnpatch import dispatch
from attnpatch.options import from_compile
from attnpatch.testing.inputs import random_call


class Attention(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.transpose(-1, -2) * 0.3).softmax(dim=-1) @ v


QKV = random_call(2, 2, 2, 5, 5, 8)[:3]


def patched(**options):
    return attnpatch.patch(Attention(), **options)


def compiled(**options):
    return torch.compile(Attention(), backend="attnpatch", options=options)


def rewritten(**options):
    return attnpatch.rewrite(torch.fx.symbolic_trace(Attention()), QKV, **options)[0]


@pytest.fixture
def calls(monkeypatch):
    """Every call that is dispatched."""
    seen, run = [], dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda call, names: seen.append((call, names)) or run(call, names))
    return seen


@pytest.mark.parametrize("way_in", [patched, compiled, rewritten])
@pytest.mark.parametrize(
    ("options", "invariant", "names"),
    [
        ({}, False, ()),
        ({"batch_invariant": False}, False, ()),
        ({"batch_invariant": True}, True, ()),
        ({"batch_invariant": True, "backends": "cpu.tiled"}, True, ("cpu.tiled",)),
    ],
    ids=str,
)
def test_the_option_reaches_the_call(way_in, options, invariant, names, calls):
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(way_in(**options)(*QKV), Attention()(*QKV))
    assert [(call.batch_invariant, given) for call, given in calls] == [(invariant, names)]


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_it_is_true_or_false(value):
    """A truthy string from a configuration file would say yes to "no"."""
    with pytest.raises(ValueError, match=f"batch_invariant={value!r} is neither True nor False"):
        attnpatch.patch(Attention(), batch_invariant=value)


def test_it_is_no_option_of_inductor():
    options = from_compile(None, {"batch_invariant": True})
    assert (options.batch_invariant, options.rest, dict(options.inductor)) == (True, "eager", {})


def test_a_backend_that_makes_no_such_promise_is_named():
    """A named backend never falls back silently."""
    with pytest.raises(attnpatch.NoBackend, match=r"cpu\.sdpa: batch_invariant: torch's scaled_dot_product_attention"):
        rewritten(batch_invariant=True, backends="cpu.sdpa")(*QKV)
