"""transformers' continuous batching through a patched model: its own thread, its own paged cache, packed requests."""

from collections import Counter

import pytest
import torch
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

import attnpatch

BROKEN = getattr(PagedAttentionCache.update, "_torchdynamo_disable", False)
"""transformers 5.24 forbids compilation of its cache's update: a graph break in every layer, whoever compiles."""

needs_whole_graphs = pytest.mark.skipif(BROKEN, reason="this transformers breaks the graph in its paged cache")

PROMPTS = [list(range(3, 12)), list(range(20, 25)), list(range(30, 63)), list(range(40, 47))]


def configs(**kwargs):
    """Room for 32 tokens per step, so that the third prompt is cut into chunks."""
    return {
        "generation_config": GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0),
        "continuous_batching_config": ContinuousBatchingConfig(
            **{"block_size": 16, "num_blocks": 16, "max_batch_tokens": 32, **kwargs}
        ),
    }


def generate_batch(model, **kwargs):
    """New tokens of each request."""
    return tokens_of(model.generate_batch(PROMPTS, **configs(**kwargs)))


def serve(model, **kwargs):
    """Like generate_batch, but every request waits when the first step begins: the steps are the same each time."""
    manager = model.init_continuous_batching(**configs(**kwargs))
    requests = manager.add_requests(PROMPTS, max_new_tokens=5)
    manager.start()
    outputs = [manager.get_result(timeout=300) for _ in requests]
    manager.stop()
    manager.destroy()
    by_id = {output.request_id: output for output in outputs}
    return tokens_of({request: by_id[request] for request in requests})


def tokens_of(outputs):
    assert [output.error for output in outputs.values()] == [None] * len(PROMPTS)
    return [output.generated_tokens for output in outputs.values()]


def graphs_of(model, **kwargs):
    """How many graphs torch.compile makes with a backend that changes nothing."""
    graphs = []
    model.compile(backend=lambda gm, inputs: graphs.append(gm) or gm.forward)
    with torch._dynamo.config.patch(recompile_limit=64):
        serve(model, **kwargs)
    torch._dynamo.reset()
    return len(graphs)


@pytest.fixture
def make(llama_with):
    def make(attn_implementation="paged|sdpa", layers=1):
        return llama_with(layers, attn_implementation, hidden_size=64, head_dim=16)

    return make


STEPS = {
    # max_batch_tokens: calls by phase and backend. With 8, every prompt is cut, and one request decodes alone at last.
    32: {("prefill", "cpu.sdpa"): 1, ("append", "cpu.tiled"): 5},
    8: {("prefill", "cpu.sdpa"): 1, ("append", "cpu.tiled"): 10, ("decode", "cpu.tiled"): 1},
}


@needs_whole_graphs
@pytest.mark.parametrize(
    ("attn_implementation", "layers", "max_batch_tokens"),
    [("paged|sdpa", 2, 32), ("paged|eager", 2, 32), ("paged|sdpa", 1, 8)],
)
def test_tokens_sites_and_graphs(make, attn_implementation, layers, max_batch_tokens):
    """All steps but the first read the pool where it lies; each counts, though another thread runs them."""
    limits = {"max_batch_tokens": max_batch_tokens}
    expected = serve(make(attn_implementation, layers), **limits)
    graphs = graphs_of(make(attn_implementation, layers), **limits)
    model = attnpatch.patch(make(attn_implementation, layers), strict=True)
    assert serve(model, **limits) == expected
    report = attnpatch.report(model)
    assert (report.gaps, report.summary["graphs"]) == ([], graphs)
    assert len(report.sites) == layers
    for site in report.sites:
        assert site.status == "fused"
        assert "pages" in site.mask
        calls = Counter()
        for d in site.dispatches:  # one per mask
            calls[d.phase, d.backend] += d.calls
        assert calls == STEPS[max_batch_tokens]


@needs_whole_graphs
def test_between_calls_of_generate(make):
    """generate_batch changes the model's attention and puts it back; the patch stays on."""
    model, ids = make("sdpa"), torch.tensor([PROMPTS[0]])
    expected = generate_batch(model), model.generate(ids, max_new_tokens=3, do_sample=False)
    attnpatch.patch(model, strict=True)
    for _ in range(2):
        assert generate_batch(model) == expected[0]
        assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected[1])
    assert attnpatch.report(model).gaps == []


@needs_whole_graphs
def test_windows_are_not_read_from_the_pool():
    """Their keys are gathered, partly replaced, and only then written: pool and table would be other keys."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=6, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = MistralForCausalLM._from_config(config, attn_implementation="paged|sdpa").eval()
    expected = generate_batch(model)
    attnpatch.patch(model, strict=True)
    assert generate_batch(model) == expected
    assert ["pages" in site.mask for site in attnpatch.report(model).sites] == [False]


@needs_whole_graphs
def test_transformers_compiles_by_itself(make):
    """Its varlen_compile_config with our backend, on a model that is not patched."""
    model = make()
    expected = generate_batch(model)
    assert generate_batch(model, varlen_compile_config=CompileConfig(backend="attnpatch", mode=None)) == expected
    report = attnpatch.report(model)
    assert [site.status for site in report.sites] == ["fused"]
    assert report.summary["graphs"] == 1, "it pads to fixed lengths"


@pytest.mark.skipif(not BROKEN, reason="this transformers compiles its paged cache")
def test_breaks_of_transformers_are_gaps(make):
    expected = generate_batch(make("sdpa"))
    model = attnpatch.patch(make("sdpa"))
    assert generate_batch(model) == expected
    report = attnpatch.report(model)
    assert (report.summary["fused"], report.summary["refused"]) == (1, 0)
    assert {gap.kind for gap in report.gaps} == {"graph break"}
