"""What calls of a patched model do with its own cache beside generating: as without the patch."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

import attnpatch
from attnpatch.caches.buffered import BufferedCache
from attnpatch.caches.tbq4 import TBQ4Cache
from tests.caches.conftest import fused

WINDOW = {"family": "Gemma2", "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
CONVOLUTION = {"family": "Lfm2", "layer_types": ["conv", "full_attention"]}


def patched_and_not(model, call):
    """What ``call`` gives before the model is patched, and after."""
    expected = call(model)
    attnpatch.patch(model, strict=True, cache="buffered")
    return call(model), expected


@pytest.mark.parametrize(
    "mode", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3, "batch": 1}], ids=["beams", "lookup"]
)
def test_inference_mode(model_with, run, mode):
    """And outside of it, on the cache that was made inside."""

    def call(model):
        with torch.inference_mode():
            out = run(model, None, return_dict_in_generate=True, max_new_tokens=9, **mode)
        ids = torch.cat([out.sequences[:1], torch.tensor([[7, 8]])], dim=1)
        cache = out.past_key_values
        cache.batch_select_indices(torch.tensor([0]))
        with torch.no_grad():
            return out.sequences.clone(), model(ids[:, cache.get_seq_length() :], past_key_values=cache).logits

    torch.testing.assert_close(*patched_and_not(model_with(num_hidden_layers=1), call))


def test_lookup_with_a_window(model_with, run, graphs):
    """generate() crops by a tensor, which must not become a length that graphs depend on."""
    tokens, expected = patched_and_not(
        model_with(**WINDOW), lambda m: run(m, None, prompt_lookup_num_tokens=3, batch=1, max_new_tokens=16)
    )
    assert torch.equal(tokens, expected)
    assert len(graphs) <= 4


@pytest.mark.parametrize(
    "mode", [{"prefill_chunk_size": 4, "pads": 3}, {"prompt_lookup_num_tokens": 3, "batch": 1}], ids=str
)
def test_several_tokens_on_the_state_of_a_convolution(model_with, run, mode):
    """It takes the last entries of a mask for those of the tokens."""
    tokens, expected = patched_and_not(model_with(**CONVOLUTION), lambda m: run(m, None, length=11, **mode))
    assert torch.equal(tokens, expected)


def test_a_cache_without_a_config_keeps_all_tokens_of_a_window(model_with, prompt):
    model = model_with(**WINDOW)

    def call(model):
        cache = DynamicCache()
        with torch.no_grad():
            logits = [model(**prompt(9, 1), past_key_values=cache).logits]
            cache.crop(-6)
            logits += [model(prompt(n, 1)["input_ids"], past_key_values=cache).logits for n in (5, 1)]
        return logits, [(layer.keys, layer.values) for layer in cache.layers], cache.get_seq_length()

    torch.testing.assert_close(*patched_and_not(model, call))
    assert fused(model) == (2, 0, [])
    for kind, dtype in ((BufferedCache, torch.float32), (TBQ4Cache, torch.uint8)):
        cache = DynamicCache()
        kind.take_over(cache, model)
        with torch.no_grad():
            model(**prompt(9, 1), past_key_values=cache)
        assert [layer.key_buffer.dtype for layer in cache.layers] == [torch.float32, dtype]
