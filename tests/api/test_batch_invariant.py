"""The option batch_invariant, from every way in to the call that a backend gets."""

import pytest
import torch

import attnpatch
from attnpatch import dispatch
from attnpatch.options import from_compile
from tests.api.ways_in import QKV, WAYS_IN, Attention, rewritten


@pytest.fixture
def calls(monkeypatch):
    """Every call that is dispatched."""
    seen, run = [], dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda call, names: seen.append((call, names)) or run(call, names))
    return seen


@pytest.mark.parametrize("way_in", WAYS_IN)
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
