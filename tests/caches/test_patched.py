"""PagedCache under attnpatch.patch: the same tokens, every site fused, pages allocated outside of few graphs."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

import attnpatch
from attnpatch.caches import paged
from attnpatch.caches.paged import PagedCache
from attnpatch.caches.pages import OutOfPages
from attnpatch.graph import op
from tests.caches.conftest import LAYERS_AND_MODES, fused, symbols


@pytest.fixture
def model(model_with):
    """One layer: what depends on their number is tested in test_generate."""
    return model_with(num_hidden_layers=1)


@LAYERS_AND_MODES
def test_generate(model_with, run, mode, layers, attn_implementation):
    model = model_with(num_hidden_layers=layers, attn_implementation=attn_implementation)
    expected = run(model, DynamicCache(config=model.config), **mode)
    attnpatch.patch(model, strict=True)
    cache = PagedCache(model.config, num_pages=40, page_size=4)
    assert torch.equal(run(model, cache, **mode), expected)
    assert fused(model) == (layers, 0, [])
    assert cache.get_seq_length() == expected.shape[1] - 1


def test_graphs_while_the_table_is_wide_enough(model, run, graphs):
    """Three prompt lengths, twice each, a new cache for each: prefill of one length, of any, and decode."""
    attnpatch.patch(model, strict=True)
    for length in (12, 12, 9, 9, 17, 17):
        run(model, PagedCache(model.config, num_pages=40), length=length)
    assert len(graphs) == 3
    assert [symbols(gm) for gm in graphs[:2]] == [[], []], "prefill of one length, decode"


def test_graphs_while_the_table_grows(model, run, graphs, monkeypatch):
    """From 4 blocks to 64: at most two graphs for prefill and two for decode."""
    monkeypatch.setattr(paged, "FIRST_CAPACITY", 16)
    expected = run(model, DynamicCache(config=model.config), length=12, max_new_tokens=60)
    attnpatch.patch(model, strict=True)
    cache = PagedCache(model.config, num_pages=128, page_size=4)
    assert torch.equal(run(model, cache, length=12, max_new_tokens=60), expected)
    for length in (100, 30):
        run(model, PagedCache(model.config, num_pages=128, page_size=4), length=length)
    assert len(graphs) <= 4
    assert symbols(graphs[1]) == [], "decode before the first growth"


def test_kernels_get_the_pools_and_the_table(model, run, graphs):
    """The graph writes, attends, and gathers nothing."""
    attnpatch.patch(model)
    run(model, PagedCache(model.config, num_pages=40))
    names = [op(node) for node in graphs[-1].graph.nodes]
    assert [name for name in names if name in ("cache_write", "attention")] == ["cache_write", "attention"]
    assert not {"index_select", "softmax", "where"} & set(names)
    (attention,) = (node for node in graphs[-1].graph.nodes if op(node) == "attention")
    inputs = [
        attention.args[1],
        attention.args[2],
        attention.kwargs["block_table"],
        attention.kwargs["q_offset_tensor"],
    ]
    ends = ["layers_0_keys", "layers_0_values", "block_table", "length"]
    assert [x.op == "placeholder" and x.name.endswith(end) for x, end in zip(inputs, ends, strict=True)] == [True] * 4


def test_kernels_read_what_is_stored_alone(model, run):
    """Of the sequences' own pages too: the pools are full of NaN."""
    expected = run(model, DynamicCache(config=model.config))
    cache = PagedCache(model.config, num_pages=40)
    cache.layers[0].keys.fill_(float("nan"))
    cache.layers[0].values.fill_(float("nan"))
    assert torch.equal(run(attnpatch.patch(model), cache), expected)


def test_a_chat_goes_on_and_forks(model, prompt):
    """Kept cache, positional ids, no mask; then two ways on from one prefix."""
    ids = prompt(length=9, batch=1)["input_ids"]
    with torch.no_grad():
        expected = [model(torch.cat([ids, torch.tensor([way])], 1)).logits[:, -1] for way in ([8], [7, 6])]
        attnpatch.patch(model, strict=True)
        cache = PagedCache(model.config, num_pages=8, page_size=4)
        model(ids, past_key_values=cache)
        other = cache.fork()
        got = [
            model(torch.tensor([way]), past_key_values=c).logits[:, -1] for c, way in ((cache, [8]), (other, [7, 6]))
        ]
    torch.testing.assert_close(got, expected)
    assert (cache.get_seq_length(), other.get_seq_length(), cache.free_pages) == (10, 11, 8 - 4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_four_dimensions(model_with, dtype):
    model = model_with(attn_implementation="sdpa" if dtype == torch.bool else "eager", num_hidden_layers=1)
    keep = torch.tensor([[True, False, True, True, True]]).expand(5, 5).tril()[None, None]
    mask = keep if dtype == torch.bool else torch.where(keep, 0.0, torch.finfo(dtype).min)
    ids = torch.arange(3, 8)[None]
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        attnpatch.patch(model, strict=True)
        got = model(ids, attention_mask=mask, past_key_values=PagedCache(model.config, num_pages=8)).logits
    torch.testing.assert_close(got, expected)


def test_a_mask_per_type_of_layer(model_with):
    kinds = ["full_attention", "sliding_attention"]
    model = model_with("Gemma2", sliding_window=4, layer_types=kinds)
    keep = torch.ones(9, 9, dtype=torch.bool).tril()
    masks = dict(zip(kinds, [keep[None, None], (keep & ~keep.tril(-4))[None, None]], strict=True))
    masks = {kind: torch.where(mask, 0.0, torch.finfo(torch.float32).min) for kind, mask in masks.items()}
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        expected = model(ids).logits
        attnpatch.patch(model, strict=True)
        got = model(ids, attention_mask=masks, past_key_values=PagedCache(model.config, num_pages=8)).logits
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("disabled", ["forward", "self_attn"])
def test_a_layer_outside_of_graphs(model_with, run, disabled):
    """It gets as many keys as the graph around it built a mask for."""
    model = model_with()
    expected = run(model, DynamicCache(config=model.config))
    layer = model.model.layers[0]
    owner = layer if disabled == "forward" else layer.self_attn
    owner.forward = torch.compiler.disable(owner.forward)
    attnpatch.patch(model)
    assert torch.equal(run(model, PagedCache(model.config, num_pages=40)), expected)
    assert attnpatch.report(model).gaps != []


@pytest.mark.parametrize("by_config", [True, False])
def test_attention_weights_are_as_wide_as_the_keys(model, prompt, by_config):
    ids, options = prompt()["input_ids"], {} if by_config else {"output_attentions": True}
    model.config.output_attentions = by_config
    with torch.no_grad():
        expected = model(ids, **options)
        got = attnpatch.patch(model)(ids, past_key_values=PagedCache(model.config, num_pages=40), **options)
    torch.testing.assert_close((got.logits, got.attentions), (expected.logits, expected.attentions))


def test_a_window(model_with, run):
    model = model_with("Mistral", sliding_window=6, num_hidden_layers=1)
    options = {"length": 4, "pads": 1, "max_new_tokens": 9}
    expected = run(model, DynamicCache(config=model.config), **options)
    attnpatch.patch(model, strict=True)
    assert torch.equal(run(model, PagedCache(model.config, num_pages=16, page_size=4), **options), expected)
    assert fused(model) == (1, 0, [])
    assert "window" in attnpatch.report(model).sites[0].mask


def test_a_model_that_takes_lengths_from_the_width_of_its_keys(run):
    """GPT-Neo slices its causal mask by it, and has no position past the 32nd: the full table would be too wide."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    torch.manual_seed(0)
    config = GPTNeoConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=1, attention_types=[[["global"], 1]],
        num_heads=4, max_position_embeddings=32, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = GPTNeoForCausalLM._from_config(config, attn_implementation="eager").eval()
    assert not model._can_compile_fullgraph
    expected = run(model, DynamicCache(config=config), pads=3)
    attnpatch.patch(model, strict=True)
    assert torch.equal(run(model, PagedCache(config, num_pages=32, page_size=4), pads=3), expected)
    assert fused(model) == (1, 0, [])


def test_full_pool_is_an_error_before_the_forward(model):
    attnpatch.patch(model, strict=True)
    cache = PagedCache(model.config, num_pages=2, page_size=4)
    with torch.no_grad():
        model(torch.arange(3, 8)[None], past_key_values=cache)
        with pytest.raises(OutOfPages, match="need 1 pages of 4 tokens; 0 of 2 are free"):
            model(torch.arange(8, 12)[None], past_key_values=cache)
        got = model(torch.tensor([[8]]), past_key_values=cache).logits[:, -1]
        attnpatch.unpatch(model)
        torch.testing.assert_close(got, model(torch.arange(3, 9)[None]).logits[:, -1])


def test_a_forward_that_failed_is_done_again(model):
    """strict raises while the graph is made; what was reserved is given back."""
    cache = PagedCache(model.config, num_pages=8, page_size=4)
    attnpatch.patch(model, strict=True)
    with torch.no_grad():
        with pytest.raises(attnpatch.AttentionNotPatched):
            model(torch.arange(3, 8)[None], past_key_values=cache, output_attentions=True)
        assert (cache.get_seq_length(), cache.free_pages) == (0, 8)
        got = model(torch.arange(3, 9)[None], past_key_values=cache).logits[:, -1]
        attnpatch.unpatch(model)
        torch.testing.assert_close(got, model(torch.arange(3, 9)[None]).logits[:, -1])


def test_without_a_name_for_the_input(model):
    with pytest.raises(ValueError, match="needs input_ids or inputs_embeds by name; got past_key_values"):
        attnpatch.patch(model)(past_key_values=PagedCache(model.config, num_pages=2))


def test_other_compilers_break_the_graph_and_get_it_right(model, run):
    expected = run(model, DynamicCache(config=model.config), max_new_tokens=3)
    model.compile(backend="eager")
    assert torch.equal(run(model, PagedCache(model.config, num_pages=8), max_new_tokens=3), expected)
