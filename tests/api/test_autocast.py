"""Models of float32 weights under autocast: fused in its dtype, as right as the unpatched model."""

import pytest
import torch

import attnpatch
from attnpatch.testing.tolerance import assert_same_function, run_float64

LOW = torch.bfloat16


def dtypes(model):
    """What the sites run in; nothing may be refused or run past the patch."""
    report = attnpatch.report(model)
    assert report.summary["refused"] == 0
    assert not report.gaps
    return {site.dtype for site in report.sites}


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", [None, "buffered"])
def test_prefill_and_decode(llama_with, attn_implementation, cache):
    """Keys come out of the rotary embedding in float32 and values in bfloat16, and so they lie in the cache."""
    model = llama_with(layers=1, attn_implementation=attn_implementation)
    ids = torch.randint(3, 60, (2, 9))

    def forward(model, *last):
        past = model(input_ids=ids).past_key_values
        return model(input_ids=ids[:, :1], past_key_values=past).logits

    y64 = run_float64(lambda: forward(model.double()))
    model.float()
    with torch.no_grad(), torch.autocast("cpu", LOW):
        original = forward(model)
        with attnpatch.patched(model, cache=cache, strict=True):
            y = forward(model)
            assert dtypes(model) == {"bfloat16"}
    assert y.dtype == original.dtype == LOW
    assert_same_function(y, original, y64)


def test_without_it_again(llama_with):
    """A graph made under autocast does not run outside of it, nor the other way round."""
    model = llama_with(layers=1)
    ids = torch.randint(3, 60, (2, 9))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        attnpatch.patch(model, strict=True)
        with torch.autocast("cpu", LOW):
            assert model(input_ids=ids).logits.dtype == LOW
        assert dtypes(model) == {"bfloat16"}
        y = model(input_ids=ids).logits
    torch.testing.assert_close(y, expected)
    assert dtypes(model) == {"float32"}
