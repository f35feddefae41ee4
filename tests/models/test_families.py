"""What people do with a family beyond the runs of docs/coverage.md: masks of their own, packed sequences."""

import torch

import attnpatch
from attnpatch.testing.tolerance import assert_same_function, run_float64
from tests.models.families import FAMILIES


def test_llama_in_a_half_precision_with_its_own_causal_mask():
    """A 4-D mask from the caller passes through the model untouched and is streamed."""
    model = FAMILIES["llama"].build("eager").to(torch.bfloat16)
    ids, mask = torch.randint(3, 60, (2, 12)), torch.full((2, 1, 12, 12), torch.finfo(torch.bfloat16).min)
    mask = mask.triu(1).to(torch.bfloat16)
    with torch.no_grad():
        original, y64 = model(ids, attention_mask=mask).logits, run_float64(model, ids, attention_mask=mask).logits
        attnpatch.patch(model, strict=True)
        assert_same_function(model(ids, attention_mask=mask).logits, original, y64)
    assert attnpatch.report(model).sites[0].mask == "streamed bias [2, 1, 12, 12]"


def test_packed_sequences():
    """Position ids that restart: without a cache the model builds a mask of documents."""
    model = FAMILIES["llama"].build("eager")
    ids, positions = torch.randint(3, 60, (1, 12)), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    kwargs = {"position_ids": positions, "use_cache": False}
    with torch.no_grad():
        original, y64 = model(ids, **kwargs).logits, run_float64(model, ids, **kwargs).logits
        assert not torch.allclose(original[0, -1], model(ids, use_cache=False).logits[0, -1])
        attnpatch.patch(model, strict=True)
        assert_same_function(model(ids, **kwargs).logits, original, y64)
