"""TBQ4Cache under attnpatch.patch: the tokens of the simulated cache, few graphs, buffers that stay; patch(cache=)."""

import logging

import pytest
import torch
from transformers.cache_utils import DynamicCache, StaticCache

import attnpatch
from attnpatch import patching
from attnpatch.caches import layers
from attnpatch.caches.paged import PagedCache
from attnpatch.caches.tbq4 import TBQ4Cache
from attnpatch.graph import op
from tests.caches.conftest import LAYERS_AND_MODES, fill_behind, fused, symbols
from tests.caches.simulated import simulated_cache


@pytest.fixture
def model(model_with):
    """One layer: what depends on their number is tested in test_generate."""
    return model_with(num_hidden_layers=1)


@LAYERS_AND_MODES
def test_generate(model_with, run, mode, layers, attn_implementation):
    model = model_with(num_hidden_layers=layers, attn_implementation=attn_implementation, head_dim=32)
    expected = run(model, simulated_cache(model), **mode)
    attnpatch.patch(model, strict=True)
    cache = TBQ4Cache(model)
    assert torch.equal(run(model, cache, **mode), expected)
    assert fused(model) == (layers, 0, [])
    assert cache.get_seq_length() == expected.shape[1] - 1


CHOICES = {
    "int8 K, dense V": {"keys": "int8", "values": "dense"},
    "dense K": {"keys": "dense"},
    "not centred": {"centre_keys": False},
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_formats_and_chunks(model, prompt, choice):
    """A prompt, a chunk, a token; appends of few tokens are those of a prompt lookup."""
    caches = simulated_cache(model, **choice), TBQ4Cache(model, **choice)
    with torch.no_grad():
        outputs = [[model(prompt(n)["input_ids"], past_key_values=caches[0]).logits for n in (9, 70, 1)]]
        attnpatch.patch(model, strict=True)
        outputs.append([model(prompt(n)["input_ids"], past_key_values=caches[1]).logits for n in (9, 70, 1)])
    torch.testing.assert_close(*outputs)
    assert fused(model) == (1, 0, [])


def test_graphs_while_there_is_room(model, run, graphs):
    """Three prompt lengths, twice each, a new cache for each: prefill of one length, of any, and decode."""
    attnpatch.patch(model, strict=True)
    for length in (12, 12, 9, 9, 17, 17):
        run(model, TBQ4Cache(model), length=length)
    assert len(graphs) == 3
    assert [symbols(gm) for gm in graphs[:2]] == [[], []], "prefill of one length, decode"


def test_graphs_while_buffers_grow(model, run, graphs, monkeypatch):
    """From 16 tokens to 128: at most two graphs for prefill and two for decode."""
    monkeypatch.setattr(layers, "FIRST_CAPACITY", 16)
    expected = run(model, simulated_cache(model), length=12, max_new_tokens=60)
    attnpatch.patch(model, strict=True)
    assert torch.equal(run(model, TBQ4Cache(model), length=12, max_new_tokens=60), expected)
    for length in (100, 30):
        run(model, TBQ4Cache(model), length=length)
    assert len(graphs) <= 4
    assert symbols(graphs[1]) == [], "decode before the first growth"


def addresses(cache):
    (layer,) = cache.layers
    tensors = layer.key_buffer, layer.key_scale, layer.value_buffer, layer.value_scale, cache.tokens.position
    return [x.data_ptr() for x in tensors]


def test_addresses_stay_between_growths(model, prompt, monkeypatch):
    monkeypatch.setattr(layers, "FIRST_CAPACITY", 16)
    attnpatch.patch(model, strict=True)
    cache = TBQ4Cache(model)
    places = []
    with torch.no_grad():
        for n in (14, 1, 1, 1):
            model(prompt(n)["input_ids"], past_key_values=cache)
            places.append(addresses(cache))
    assert places[0] == places[1] == places[2]
    assert set(places[3][:4]).isdisjoint(places[2][:4])


def test_decode_writes_in_place_and_asks_the_host_nothing(model, run, graphs):
    """Buffers and their length are inputs of the graph, which makes no number of a tensor."""
    attnpatch.patch(model)
    run(model, TBQ4Cache(model))
    nodes = list(graphs[-1].graph.nodes)
    (write,) = (node for node in nodes if op(node) == "cache_write")
    inputs = [write.args[i] for i in (0, 1, 4, 6, 7)]
    ends = ["key_buffer", "value_buffer", "position", "key_scale", "value_scale"]
    assert [x.op == "placeholder" and x.name.endswith(end) for x, end in zip(inputs, ends, strict=True)] == [True] * 5
    assert not {"item", "tolist", "nonzero", "index_copy"} & {op(node) for node in nodes}


def test_what_is_not_stored_is_not_read(model, run):
    """The buffers behind the tokens are full of NaN from the first decode step on."""
    expected = run(model, simulated_cache(model), max_new_tokens=5)
    attnpatch.patch(model, strict=True)
    cache = TBQ4Cache(model)
    filled = fill_behind(cache, "key_scale", "value_scale")
    assert torch.equal(run(model, cache, max_new_tokens=5), expected)
    assert len(filled) == 2 * 4


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_four_dimensions(model_with, dtype):
    model = model_with(attn_implementation="sdpa" if dtype == torch.bool else "eager", num_hidden_layers=1)
    keep = torch.tensor([[True, False, True, True, True, True]]).expand(6, 6).tril()[None, None]
    mask = keep if dtype == torch.bool else torch.where(keep, 0.0, torch.finfo(dtype).min)
    ids = torch.arange(3, 9)[None]
    outputs = []
    with torch.no_grad():
        for cache in (simulated_cache(model), TBQ4Cache(model)):
            if isinstance(cache, TBQ4Cache):
                attnpatch.patch(model, strict=True)
            model(ids[:, :4], attention_mask=mask[:, :, :4, :4], past_key_values=cache)
            outputs.append(model(ids[:, 4:], attention_mask=mask[:, :, 4:], past_key_values=cache).logits)
    torch.testing.assert_close(*outputs)


HYBRIDS = {
    "Gemma2": {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
    "GptOss": {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.mark.parametrize(("family", "config"), HYBRIDS.items(), ids=HYBRIDS)
def test_layers_with_a_window(model_with, run, family, config):
    model = model_with(family, **config)
    options = {"length": 7, "pads": 2, "max_new_tokens": 9}
    expected = run(model, simulated_cache(model), **options)
    attnpatch.patch(model, strict=True)
    assert torch.equal(run(model, TBQ4Cache(model), **options), expected)
    assert fused(model) == (2, 0, [])


def test_a_mask_per_type_of_layer(model_with):
    """That of layers with a window is as wide as what they keep."""
    kinds = ["full_attention", "sliding_attention"]
    model = model_with("Gemma2", sliding_window=4, layer_types=kinds)
    minimum = torch.finfo(torch.float32).min
    keep = torch.ones(1, 1, 1, 10, dtype=torch.bool)
    masks = {"full_attention": torch.where(keep, 0.0, minimum), "sliding_attention": torch.zeros(1, 1, 1, 4)}
    outputs = []
    with torch.no_grad():
        for cache in (simulated_cache(model), TBQ4Cache(model)):
            if isinstance(cache, TBQ4Cache):
                attnpatch.patch(model, strict=True)
            model(torch.arange(3, 12)[None], past_key_values=cache)
            outputs.append(model(torch.tensor([[5]]), attention_mask=masks, past_key_values=cache).logits)
    torch.testing.assert_close(*outputs)


CONFIG = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "hidden_size": 64}
ODD = {
    "MLA: K of 24 channels, V of 16": (
        "DeepseekV3",
        {
            "intermediate_size": 48, "num_hidden_layers": 1, "first_k_dense_replace": 1, "num_attention_heads": 4,
            "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16, "v_head_dim": 16,
        },
    ),
    "one K/V head": (
        "Falcon",
        {"num_hidden_layers": 1, "num_attention_heads": 4, "multi_query": True, "new_decoder_architecture": False},
    ),
    "ALiBi made of the mask": ("Bloom", {"n_layer": 1, "n_head": 4}),
    "lengths from the width of the keys": (
        "GPTNeo",
        {"num_layers": 1, "attention_types": [[["global"], 1]], "num_heads": 4, "max_position_embeddings": 32},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("family", "config"), ODD.values(), ids=ODD)
def test_models_of_other_shapes(run, family, config):
    """Buffers are made of the first keys and values that come, not of a config."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**CONFIG, **config)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    expected = run(model, simulated_cache(model), pads=3)
    assert torch.equal(run(model, TBQ4Cache(model), pads=3), expected)
    attnpatch.patch(model, strict=True)
    assert torch.equal(run(model, TBQ4Cache(model), pads=3), expected)
    assert fused(model) == (1, 0, [])


def test_attention_weights_are_as_wide_as_the_keys(model, prompt):
    ids, options = prompt()["input_ids"], {"output_attentions": True}
    caches = simulated_cache(model), TBQ4Cache(model)
    with torch.no_grad():
        model(ids, past_key_values=caches[0])
        expected = model(ids, past_key_values=caches[0], **options)
        attnpatch.patch(model)(ids, past_key_values=caches[1])
        got = model(ids, past_key_values=caches[1], **options)
    torch.testing.assert_close((got.logits, got.attentions), (expected.logits, expected.attentions))
    assert got.attentions[0].shape[3] == 18


def test_a_forward_that_failed_is_done_again(model):
    """strict raises while the graph is made; the next forward begins where it did."""
    cache, expected = TBQ4Cache(model), simulated_cache(model)
    with torch.no_grad():
        model(torch.arange(3, 8)[None], past_key_values=expected)
        want = model(torch.arange(3, 9)[None], past_key_values=expected).logits
        attnpatch.patch(model, strict=True)
        model(torch.arange(3, 8)[None], past_key_values=cache)
        with pytest.raises(attnpatch.AttentionNotPatched):
            model(torch.arange(3, 8)[None], past_key_values=cache, output_attentions=True)
        assert cache.get_seq_length() == 5
        torch.testing.assert_close(model(torch.arange(3, 9)[None], past_key_values=cache).logits, want)


def test_a_head_dim_that_cannot_be_cut(model_with, run):
    model = attnpatch.patch(model_with(head_dim=20, num_hidden_layers=1))
    with pytest.raises(ValueError, match="layer 0 has heads of 20 channels"):
        run(model, TBQ4Cache(model))


def test_no_room_is_an_error_before_the_forward(model):
    attnpatch.patch(model, strict=True)
    cache = TBQ4Cache(model, max_cache_len=6)
    with torch.no_grad():
        model(torch.arange(3, 8)[None], past_key_values=cache)
        with pytest.raises(ValueError, match="holds 5 tokens and was given 2 more; max_cache_len is 6"):
            model(torch.arange(8, 10)[None], past_key_values=cache)
        model(torch.tensor([[8]]), past_key_values=cache)
    assert cache.get_seq_length() == 6


def test_other_compilers_break_the_graph_and_get_it_right(model, run):
    expected = run(model, simulated_cache(model), max_new_tokens=3)
    model.compile(backend="eager")
    assert torch.equal(run(model, TBQ4Cache(model), max_new_tokens=3), expected)


def test_patch_with_cache(model, run, mode):
    """generate() makes a DynamicCache before it calls the model; assisted generation has told it to record by then."""
    expected = run(model, simulated_cache(model), **mode)
    attnpatch.patch(model, strict=True, cache="tbq4")
    given = DynamicCache(config=model.config) if mode else None  # greedily without a cache
    assert torch.equal(run(model, given, **mode), expected)
    if given is not None:
        assert type(given) is TBQ4Cache
        assert given.get_seq_length() == expected.shape[1] - 1


def test_patch_with_cache_keeps_what_windows_were_told(model_with, run):
    """A prompt lookup takes tokens back, three and then two, from layers with a window that must have kept them."""
    model = model_with("Gemma2", sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    options = {"batch": 1, "prompt_lookup_num_tokens": 3, "max_new_tokens": 6}
    expected = run(model, simulated_cache(model), **options)
    attnpatch.patch(model, cache="tbq4")
    assert torch.equal(run(model, None, **options), expected)


def test_patch_with_cache_in_plain_calls(model, prompt):
    ids = prompt()["input_ids"]
    attnpatch.patch(model, cache="tbq4", strict=True)
    with torch.no_grad():
        assert type(model(ids).past_key_values) is TBQ4Cache
        assert type(model(ids, None, None, None).past_key_values) is TBQ4Cache, "positional arguments"
        assert model(ids, use_cache=False).past_key_values is None
        model.config.use_cache = False
        assert model(ids).past_key_values is None
        model.config.use_cache = True
        assert type(model.train()(ids).past_key_values) is DynamicCache, "training has no use for it"


def filled(model):
    cache = DynamicCache(config=model.config)
    cache.update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16), 0)
    return cache


LEFT_ALONE = {
    "filled": (filled, "DynamicCache"),
    "static": (lambda model: StaticCache(model.config, max_cache_len=16), "StaticCache"),
    "pages": (lambda model: PagedCache(model.config, num_pages=8), "PagedCache"),
    "offloading": (lambda model: DynamicCache(config=model.config, offloading=True), "DynamicCache"),
}


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "attnpatch"]


@pytest.mark.parametrize(("make", "name"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_a_cache_of_the_caller_stays(model, make, name, caplog):
    choose = patching._cache_choice(model, "tbq4")
    given = make(model)
    with caplog.at_level(logging.WARNING, "attnpatch"):
        for _ in range(2):
            assert choose({"past_key_values": given})["past_key_values"] is given
    assert type(given).__name__ == name
    assert messages(caplog) == [f'cache="tbq4" leaves a {name} of the caller as it is']


def test_a_tbq4_cache_of_the_caller_is_used_silently(model, run, caplog):
    attnpatch.patch(model, cache="tbq4")
    cache = TBQ4Cache(model, skip_layers=("first",))
    run(model, cache)
    assert cache.layers[0].key_buffer.dtype == torch.float32
    assert messages(caplog) == []


def test_models_that_have_no_use_for_it(model_with):
    from transformers import MistralConfig, MistralForCausalLM

    with pytest.raises(ValueError, match=r"models of transformers that have generate\(\); Linear has none"):
        attnpatch.patch(torch.nn.Linear(2, 2), cache="tbq4")
    with pytest.raises(ValueError, match=r"have generate\(\); LlamaModel has none"):
        attnpatch.patch(model_with().model, cache="tbq4")
    with torch.device("meta"):
        mistral = MistralForCausalLM(MistralConfig(num_hidden_layers=1, sliding_window=8, vocab_size=8))
    with pytest.raises(ValueError, match="nothing to keep of mistral"):
        attnpatch.patch(mistral, cache="tbq4")
    attnpatch.patch(mistral)  # was not patched


def test_the_option(model):
    with pytest.raises(ValueError, match="cache='paged' is none of 'auto', 'buffered', 'tbq4', None"):
        attnpatch.patch(model, cache="paged")
    gm = torch.fx.symbolic_trace(torch.nn.Identity())
    with pytest.raises(ValueError, match=r"cache='tbq4' is an option of attnpatch.patch\(model\)"):
        attnpatch.rewrite(gm, [torch.ones(1)], cache="tbq4")
    model.compile(backend="attnpatch", options={"cache": "tbq4"})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="is an option of attnpatch"):
        model(torch.tensor([[3]]))
