"""generate() after patch: the same tokens, every step fused, caches intact, and never more graphs than without."""

import pytest
import torch
from transformers.cache_utils import DynamicCache, StaticCache

import attnpatch
from attnpatch.graph import op

NEW_TOKENS = 4


def prompt(length, batch=2, pads=0):
    """Input ids and attention mask; the first sequence begins with ``pads`` pad tokens."""
    ids = torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    ids[0, :pads], mask[0, :pads] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, length=9, batch=2, pads=0, **kwargs):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **kwargs}
    return model.generate(**prompt(length, batch, pads), **options)


def calls(site):
    return sum(d.calls for d in site.dispatches)


class Recording:
    """The inner backend alone: counts graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, gm, example_inputs):
        self.graphs += 1
        return gm.forward


CACHES = [None, "static"]


@pytest.mark.parametrize(("attn_implementation", "cache"), [("eager", None), ("sdpa", "static")])
def test_tokens_graphs_and_sites(llama_with, attn_implementation, cache):
    """Three prompt lengths, twice each, and a left-padded batch: tokens as eager's, graphs as Dynamo's own."""
    rounds = [{"length": n} for n in (12, 12, 9, 9, 17, 17)] + [{"length": 12, "pads": 4}]
    model = llama_with(layers=1, attn_implementation=attn_implementation)
    expected = [generate(model, cache_implementation=cache, **r) for r in rounds]

    recorded = llama_with(layers=1, attn_implementation=attn_implementation)
    backend = Recording()
    with torch._dynamo.config.patch(recompile_limit=64):
        recorded.compile(backend=backend)
        for r in rounds:
            generate(recorded, cache_implementation=cache, **r)

    torch._dynamo.reset()
    attnpatch.patch(model, strict=True)
    for r, tokens in zip(rounds, expected, strict=True):
        assert torch.equal(generate(model, cache_implementation=cache, **r), tokens)
    report = attnpatch.report(model)
    (site,) = report.sites
    assert report.summary["graphs"] <= backend.graphs
    assert (site.status, report.gaps) == ("fused", [])
    assert calls(site) == len(rounds) * NEW_TOKENS
    prefill = "prefill" if cache is None else "append"  # a static cache is longer than the prompt
    assert {d.phase for d in site.dispatches} == {prefill, "decode"}


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_static_cache_given_by_the_caller(llama_with, attn_implementation):
    model = llama_with(attn_implementation=attn_implementation)
    cache = StaticCache(config=model.config, max_cache_len=32)
    expected = generate(model, past_key_values=StaticCache(config=model.config, max_cache_len=32))
    attnpatch.patch(model, strict=True)
    assert torch.equal(generate(model, past_key_values=cache), expected)
    assert cache.get_seq_length() == 9 + NEW_TOKENS - 1
    assert cache.layers[0].keys[:, :, : 9 + NEW_TOKENS - 1].abs().sum(-1).gt(0).all()
    assert (cache.layers[1].values[:, :, 9 + NEW_TOKENS - 1 :] == 0).all()


def test_static_cache_writes_are_executed(llama_with):
    """index_copy_ and add_ have no users in the graph, and are not dead."""
    graphs = []

    def spy(gm, example_inputs):
        from attnpatch.rewriter import rewrite_graph

        rewrite_graph(gm.graph)
        gm.recompile()
        graphs.append(gm)
        return gm.forward

    model = llama_with(layers=1)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(torch.arange(3, 8)[None], past_key_values=cache)
        model.compile(backend=spy)
        model(torch.tensor([[9]]), past_key_values=cache)
    names = [op(node) for node in graphs[-1].graph.nodes]
    assert names.count("index_copy_") == 2
    assert names.count("add_") == 1
    assert names.count("attention") == 1
    assert cache.get_seq_length() == 6


def test_dynamic_cache_holds_the_same_keys(llama_with):
    model, inputs = llama_with(), prompt(9, pads=3)
    caches = []
    for patched in (False, True):
        if patched:
            attnpatch.patch(model)
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            model(**inputs, past_key_values=cache)
            caches.append(cache)
    # layer 1's keys of pad rows come from layer 0's rows without a visible key, which differ by contract
    real = inputs["attention_mask"].bool()[:, None, :, None]
    for a, b in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(a.keys * real, b.keys * real)
        torch.testing.assert_close(a.values * real, b.values * real)


MODES = {
    "beams": {"num_beams": 3},
    "no_cache": {"use_cache": False},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3, "batch": 1},
    "chunked_prefill": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("kwargs", MODES.values(), ids=MODES)
def test_modes_of_generate(llama_with, kwargs):
    outputs = []
    for patched in (False, True):
        model = llama_with(layers=1)
        if patched:
            attnpatch.patch(model)
        torch.manual_seed(3)
        outputs.append(generate(model, **kwargs))
    assert torch.equal(*outputs)
    report = attnpatch.report(model)
    assert (report.summary["fused"], report.summary["refused"], report.gaps) == (1, 0, [])


def test_sliding_window_runs_past_the_window():
    from transformers.models.mistral.configuration_mistral import MistralConfig
    from transformers.models.mistral.modeling_mistral import MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=6, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = MistralForCausalLM._from_config(config, attn_implementation="eager").eval()
    for cache in CACHES:
        kwargs = {"length": 4, "pads": 1, "max_new_tokens": 9, "cache_implementation": cache}
        expected = generate(model, **kwargs)
        with attnpatch.patched(model, strict=True):
            assert torch.equal(generate(model, **kwargs), expected)
            assert attnpatch.report(model).summary["fused"] == 1


def test_pipeline(llama_with):
    """A pipeline calls generate of the model it was given."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TextGenerationPipeline

    tokens = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<pad>", "a", "b", "c", "d", "e"])}, unk_token="<pad>")
    )
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", padding_side="left")
    texts = []
    for patched in (False, True):
        model = llama_with(layers=1, vocab_size=6)
        if patched:
            attnpatch.patch(model, strict=True)
        pipeline = TextGenerationPipeline(model=model, tokenizer=tokenizer, batch_size=2, device="cpu")
        texts.append(pipeline(["a b c d", "e"], max_new_tokens=5, do_sample=False))
    assert texts[0] == texts[1]
    assert sum(d.calls for d in attnpatch.report(model).sites[0].dispatches) == 5
