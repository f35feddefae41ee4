"""What a user reads from, and writes to, the cache that a call returns: as from a DynamicCache."""

import copy
import pickle

import pytest
import torch
from transformers.cache_utils import DynamicCache

import attnpatch
from attnpatch.caches.buffered import BufferedCache
from attnpatch.caches.tbq4 import TBQ4Cache

WINDOW = {"family": "Gemma2", "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture
def caches(model_with, prompt):
    """Of two layers, one with a window, nine tokens in two sequences: a BufferedCache and a DynamicCache."""
    model = model_with(**WINDOW)
    both = BufferedCache(model), DynamicCache(config=model.config)
    with torch.no_grad():
        for cache in both:
            model(**prompt(9), past_key_values=cache)
    return both


def test_keys_and_values_are_those_of_the_tokens_stored(caches):
    buffered, expected = caches
    assert isinstance(buffered, DynamicCache), "PEFT and transformers ask"
    assert len(buffered) == len(expected) == 2
    for ours, theirs in zip(buffered, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert [x.keys.shape[-2] for x in buffered.layers] == [3, 9]
    assert buffered.layers[1].key_buffer.shape[-2] == 256
    torch.testing.assert_close(DynamicCache(buffered).layers[1].values, expected.layers[1].values)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_is_a_cache_of_its_own(caches, copied):
    buffered, expected = caches
    other = copied(buffered)
    buffered.reset()
    assert (buffered.get_seq_length(), buffered.layers[1].keys) == (0, None)
    assert other.get_seq_length() == 9
    torch.testing.assert_close(other.layers[1].keys, expected.layers[1].keys)


def test_keys_are_written_in_place(model_with, prompt):
    """The next token attends on what was written, as on what is assigned; another shape is refused."""
    model = attnpatch.patch(model_with(num_hidden_layers=1))
    last = {"input_ids": torch.tensor([[5], [6]])}

    def after(cache, change):
        model(**prompt(9), past_key_values=cache)
        change(cache.layers[0])
        return model(**last, past_key_values=cache).logits

    def assigned(layer):
        layer.keys, layer.values = layer.keys * 2, layer.values - 1

    def in_place(layer):
        layer.keys.mul_(2), layer.values.sub_(1)

    with torch.no_grad():
        expected = after(DynamicCache(config=model.config), assigned)
        for change in (assigned, in_place):
            torch.testing.assert_close(after(BufferedCache(model), change), expected)
        cache = BufferedCache(model)
        assert not torch.allclose(after(cache, lambda layer: None), expected, atol=1e-4)
    for name, kept in (("keys", "K"), ("values", "V")):
        with pytest.raises(
            ValueError, match=rf"layer 0 keeps {kept} .* of what is stored, \[2, 2, 10, 16\].* crop\(-n\)"
        ):
            setattr(cache.layers[0], name, cache.layers[0].keys[:, :, 2:])


def test_codes_are_read_multiplied_out(model_with, prompt):
    model = model_with(num_hidden_layers=1)
    cache, dense = TBQ4Cache(model), DynamicCache(config=model.config)
    with torch.no_grad():
        for one in (cache, dense):
            model(**prompt(9), past_key_values=one)
    for found, expected in zip(next(iter(cache))[:2], next(iter(dense))[:2], strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert (found - expected).norm() < 0.15 * expected.norm()
    with pytest.raises(ValueError, match="layer 0 keeps K in a buffer"):
        cache.layers[0].keys = cache.layers[0].keys
