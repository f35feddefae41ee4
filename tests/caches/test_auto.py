"""cache="auto": a BufferedCache where it pays, and not a word where it does not."""

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, StaticCache

import attnpatch
from attnpatch.caches.buffered import BufferedCache
from attnpatch.caches.choosing import DeviceCacheChoice


@pytest.fixture
def on_gpu(monkeypatch):
    """The CPU counts as a device where the cache pays."""
    monkeypatch.setattr(DeviceCacheChoice, "device_type", "cpu")


def cache_of(model, prompt, **arguments):
    return type(model(**prompt(), **arguments).past_key_values)


def test_on_a_gpu(on_gpu, model_with, run, prompt):
    model = model_with(num_hidden_layers=1)
    expected = run(model, None)
    attnpatch.patch(model, cache="auto", strict=True)
    assert torch.equal(run(model, None), expected)
    with torch.no_grad():
        assert cache_of(model, prompt) is BufferedCache
        assert cache_of(model, prompt, past_key_values=DynamicCache(config=model.config)) is BufferedCache
        assert model(**prompt(), use_cache=False).past_key_values is None


def test_on_a_cpu_and_with_gradients(model_with, prompt, monkeypatch):
    model = attnpatch.patch(model_with(num_hidden_layers=1), cache="auto", strict=True)
    with torch.no_grad():
        assert cache_of(model, prompt) is DynamicCache
    monkeypatch.setattr(DeviceCacheChoice, "device_type", "cpu")
    assert cache_of(model, prompt) is DynamicCache, "a later call's gradients reach its keys"


def test_other_caches_stay_without_a_word(on_gpu, model_with, prompt, caplog):
    model = attnpatch.patch(model_with(num_hidden_layers=1), cache="auto", strict=True)
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=32)
        assert cache_of(model, prompt, past_key_values=cache) is StaticCache
    assert not [r for r in caplog.records if r.name == "attnpatch"]


@pytest.mark.parametrize("family", ["T5", "Bert"])
def test_models_that_it_is_not_for(on_gpu, family):
    """An encoder-decoder, and what does not generate."""
    import transformers

    kind = {"T5": "T5ForConditionalGeneration", "Bert": "BertModel"}[family]
    config = {
        "T5": {"d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64},
        "Bert": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    }[family]
    model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**config)).eval()
    attnpatch.patch(model, cache="auto")
    assert model._compiled_call_impl.choose_cache is None


def test_a_module_of_no_library():
    model = attnpatch.patch(nn.Linear(2, 2), cache="auto")
    assert model(torch.ones(2)).shape == (2,)
