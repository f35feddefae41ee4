"""BufferedCache: the tokens of a DynamicCache, in buffers that stay. What it shares with TBQ4Cache is tested there."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

import attnpatch
from attnpatch import patching
from attnpatch.caches import layers
from attnpatch.caches.buffered import BufferedCache
from attnpatch.caches.choosing import CACHES
from attnpatch.graph import op
from tests.caches.conftest import LAYERS_AND_MODES, fill_behind, fused, symbols


@pytest.fixture
def model(model_with):
    return model_with(num_hidden_layers=1)


def test_generate(model, run, mode):
    """Of a model that is not patched."""
    expected = run(model, DynamicCache(config=model.config), **mode)
    assert torch.equal(run(model, BufferedCache(model), **mode), expected)


@LAYERS_AND_MODES
def test_generate_patched(model_with, run, mode, layers, attn_implementation):
    model = model_with(num_hidden_layers=layers, attn_implementation=attn_implementation)
    expected = run(model, DynamicCache(config=model.config), **mode)
    attnpatch.patch(model, strict=True)
    cache = BufferedCache(model)
    assert torch.equal(run(model, cache, **mode), expected)
    assert fused(model) == (layers, 0, [])
    assert cache.get_seq_length() == expected.shape[1] - 1


def test_logits_of_chunks(model, prompt):
    """A prompt, a chunk too long for an append, a few tokens, one."""
    caches = DynamicCache(config=model.config), BufferedCache(model)
    lengths = (9, 70, 3, 1)
    with torch.no_grad():
        expected = [model(prompt(n)["input_ids"], past_key_values=caches[0]).logits for n in lengths]
        attnpatch.patch(model, strict=True)
        found = [model(prompt(n)["input_ids"], past_key_values=caches[1]).logits for n in lengths]
    torch.testing.assert_close(found, expected)


def test_one_graph_decodes_at_any_length(model, run, graphs):
    """Three prompts, a new cache for each: prefill of one length and of any, and a decode whose inputs are tensors."""
    attnpatch.patch(model, strict=True)
    for length in (12, 9, 17):
        run(model, BufferedCache(model), length=length)
    assert len(graphs) == 3
    assert [symbols(gm) for gm in graphs[:2]] == [[], []], "prefill of one length, decode"
    writes = [node for node in graphs[1].graph.nodes if op(node) == "cache_write"]
    assert [node.args[i].op for node in writes for i in (0, 1, 4)] == ["placeholder"] * 3, "keys, values, position"
    assert not {"item", "index_copy"} & {op(node) for node in graphs[1].graph.nodes}


def test_addresses_stay_between_growths(model, prompt, monkeypatch):
    monkeypatch.setattr(layers, "FIRST_CAPACITY", 16)
    attnpatch.patch(model, strict=True)
    cache, places = BufferedCache(model), []
    with torch.no_grad():
        for n in (14, 1, 1, 1):
            model(prompt(n)["input_ids"], past_key_values=cache)
            (layer,) = cache.layers
            places.append([x.data_ptr() for x in (layer.key_buffer, layer.value_buffer)])
    assert places[0] == places[1] == places[2]
    assert set(places[3]).isdisjoint(places[2])


def test_what_is_not_stored_is_not_read(model, run):
    """The buffers behind the tokens are full of NaN from the first decode step on."""
    expected = run(model, DynamicCache(config=model.config), max_new_tokens=5)
    attnpatch.patch(model, strict=True)
    cache = BufferedCache(model)
    filled = fill_behind(cache, "key_buffer", "value_buffer")
    assert torch.equal(run(model, cache, max_new_tokens=5), expected)
    assert len(filled) == 2 * 4


def test_layers_with_a_window_stay_bounded(model_with, run):
    model = model_with("Gemma2", sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    expected = run(model, DynamicCache(config=model.config), max_new_tokens=9)
    attnpatch.patch(model, strict=True)
    cache = BufferedCache(model)
    assert torch.equal(run(model, cache, max_new_tokens=9), expected)
    assert cache.layers[0].keys.shape[2] < 8
    assert cache.layers[1].key_buffer.shape[2] == 256


def test_a_limit(model, run):
    cache = BufferedCache(model, max_cache_len=12)
    with pytest.raises(ValueError, match="the cache holds 12 tokens and was given 1 more; max_cache_len is 12"):
        run(model, cache, max_new_tokens=6)
    assert cache.layers[0].key_buffer.shape[2] == 12
    with pytest.raises(ValueError, match="max_cache_len=0 is no number of tokens"):
        BufferedCache(model, 0)


def test_models_that_do_not_fit():
    from transformers import FalconH1Config, MistralConfig, MllamaConfig, T5Config

    for config, message in (
        (T5Config(), "BufferedCache is for decoders; t5 has an encoder"),
        (MllamaConfig(), "BufferedCache is for decoders; mllama_text_model has cross-attention"),
        (MistralConfig(sliding_window=8), "BufferedCache has nothing to keep of mistral"),
        (FalconH1Config(), "BufferedCache keeps the keys and values of full attention; falcon_h1 has hybrid"),
    ):
        with pytest.raises(ValueError, match=message):
            BufferedCache(config)


@pytest.mark.parametrize("name", CACHES)
def test_the_option_gives_calls_a_cache(model, run, name):
    """generate() makes a DynamicCache before it calls the model."""
    expected = run(model, CACHES[name](model))
    attnpatch.patch(model, strict=True, cache=name)
    given = DynamicCache(config=model.config)
    assert torch.equal(run(model, given), expected)
    assert type(given) is CACHES[name]
    with torch.no_grad():
        assert type(model(torch.tensor([[3]])).past_key_values) is CACHES[name]


def test_which_caches_of_the_caller_are_named(model, caplog):
    """A TBQ4Cache is a BufferedCache; the reverse is not what was asked for."""
    tbq4, buffered = CACHES["tbq4"](model), BufferedCache(model)
    assert patching._cache_choice(model, "buffered")({"past_key_values": tbq4})["past_key_values"] is tbq4
    assert caplog.messages == []
    assert patching._cache_choice(model, "tbq4")({"past_key_values": buffered})["past_key_values"] is buffered
    assert caplog.messages == ['cache="tbq4" leaves a BufferedCache of the caller as it is']


@pytest.mark.parametrize(
    ("needed", "expected"),
    [(1, 256), (256, 256), (257, 768), (600, 1280), (4096, 4608), (65536, 73728), (65537, 73984)],
    ids=str,
)
def test_room_for_tokens_to_come(needed, expected):
    """An eighth more at most where it is much."""
    tokens = layers.Tokens(None)
    tokens.begin(needed, torch.device("cpu"))
    assert tokens.capacity == expected


def test_no_graph_is_made_after_the_first_growth(model, run, graphs, monkeypatch):
    monkeypatch.setattr(layers, "FIRST_CAPACITY", 16)
    expected = run(model, DynamicCache(config=model.config), max_new_tokens=120)
    attnpatch.patch(model, strict=True)
    assert torch.equal(run(model, BufferedCache(model), max_new_tokens=120), expected)
    assert len(graphs) == 3, "prefill, decode in the first buffer, decode in any: of 48, 96 and 144 tokens"


def test_a_model_with_tokens_of_its_own(model, prompt):
    """It stores more than it was given, which nobody would count."""
    from transformers import LlamaForCausalLM

    class Prefixed(LlamaForCausalLM):
        def forward(self, input_ids, past_key_values=None, **kwargs):
            embeds = self.model.embed_tokens(input_ids)
            return super().forward(inputs_embeds=torch.cat([embeds[:, :2], embeds], 1), past_key_values=past_key_values)

    prefixed = Prefixed(model.config).eval()
    attnpatch.patch(prefixed)
    cache = BufferedCache(prefixed)
    with torch.no_grad(), pytest.raises(ValueError, match="was given 9 tokens and stored 11: it has some of its own"):
        prefixed(input_ids=prompt(9)["input_ids"], past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_mask_that_is_none(model, prompt):
    """The call ends before it began: the cache goes on as it was, in a model that is not patched, too."""
    ids, cache, other = prompt(9)["input_ids"], BufferedCache(model), DynamicCache(config=model.config)
    attnpatch.patch(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="attention_mask is a str; this cache takes a tensor or a dict"):
            model(ids[:, :1], past_key_values=cache, attention_mask="causal")
        attnpatch.unpatch(model)
        model(ids, past_key_values=other)
        for _ in range(3):
            logits = [model(ids[:, :1], past_key_values=x).logits for x in (cache, other)]
    assert cache.get_seq_length() == 12
    torch.testing.assert_close(*logits)
