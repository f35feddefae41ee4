"""What calls of a patched model do with its own cache beside generating: as without the patch."""

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


def test_inference_mode(model_with, run):
    """And outside of it, on a cache that was made and changed inside."""

    def call(model):
        with torch.inference_mode():
            out = run(model, None, num_beams=3, return_dict_in_generate=True)
            cache = out.past_key_values
            cache.batch_select_indices(torch.tensor([0]))
        with torch.no_grad():
            return out.sequences.clone(), model(torch.tensor([[7, 8]]), past_key_values=cache).logits

    torch.testing.assert_close(*patched_and_not(model_with(num_hidden_layers=1), call))


def test_lookup_with_a_window(model_with, run, graphs):
    """generate() crops by a tensor, which must not become a length that graphs depend on."""
    tokens, expected = patched_and_not(
        model_with(**WINDOW), lambda model: run(model, None, prompt_lookup_num_tokens=3, batch=1, max_new_tokens=16)
    )
    assert torch.equal(tokens, expected)
    assert len(graphs) <= 4


def test_several_tokens_on_the_state_of_a_convolution(model_with, run):
    """It takes the last entries of a mask for those of the tokens."""
    options = {"length": 11, "pads": 3, "prefill_chunk_size": 4}
    tokens, expected = patched_and_not(model_with(**CONVOLUTION), lambda model: run(model, None, **options))
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


def test_positions_counted_on_the_mask(model_with, prompt):
    """Of OPT, where the caller gives none."""
    model, inputs = model_with("OPT", num_hidden_layers=1, ffn_dim=48, word_embed_proj_dim=64), prompt(9, pads=3)
    step = {
        "input_ids": torch.tensor([[5], [6]]),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(2, 1)], 1),
    }

    def call(model):
        with torch.no_grad():
            return model(**step, past_key_values=model(**inputs).past_key_values).logits

    torch.testing.assert_close(*patched_and_not(model, call))


def test_an_assistant(model_with, run):
    """Patched as well; the tokens are those of greedy search, and several are verified by one append."""
    model, assistant = model_with(num_hidden_layers=1), model_with(num_hidden_layers=1)
    with torch.no_grad():
        assistant.lm_head.weight.add_(torch.randn_like(assistant.lm_head.weight), alpha=0.002)
    expected = run(model, None, batch=1, max_new_tokens=16)
    for one in (model, assistant):
        attnpatch.patch(one, strict=True, cache="buffered")
    assert torch.equal(run(model, None, batch=1, max_new_tokens=16, assistant_model=assistant), expected)
    assert fused(model) == fused(assistant) == (1, 0, [])
    phases = {d.phase: d.calls for d in attnpatch.report(model).sites[0].dispatches}
    assert phases["append"] > 1
    assert sum(phases.values()) < 16, "fewer forwards than tokens"
