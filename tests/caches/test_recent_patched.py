"""TBQ4Cache(recent=) under attnpatch.patch: the tokens of the model as it is, codes that stay codes, few graphs."""

import pytest
import torch

import attnpatch
from attnpatch.caches import layers
from attnpatch.caches.tbq4 import TBQ4Cache
from attnpatch.graph import op, value
from attnpatch.recent import FIRST
from tests.caches.conftest import LAYERS_AND_MODES, calls, fill_behind, fused, symbols
from tests.caches.simulated import recent_cache
from tests.caches.test_foreseeing import Chat

UNPACKING = {"with_recent", "rshift", "bitwise_right_shift", "stack"}


@pytest.fixture
def model(model_with):
    return model_with(num_hidden_layers=1)


@LAYERS_AND_MODES
def test_generate(model_with, run, mode, layers, attn_implementation):
    model = model_with(num_hidden_layers=layers, attn_implementation=attn_implementation, head_dim=32)
    options = {**mode, "max_new_tokens": 16}
    expected = run(model, recent_cache(model, 5), **options)
    attnpatch.patch(model, strict=True)
    assert torch.equal(run(model, TBQ4Cache(model, recent=5), **options), expected)
    assert fused(model) == (layers, 0, [])


def test_assisted_decoding(model_with, run):
    """The assistant proposes what the model mostly refuses: every step crops."""
    model, assistant = model_with(), model_with(num_hidden_layers=1, hidden_size=32)
    options = {"batch": 1, "assistant_model": assistant, "max_new_tokens": 16}
    expected = run(model, recent_cache(model, 5), **options)
    attnpatch.patch(model, strict=True)
    assert torch.equal(run(model, TBQ4Cache(model, recent=5), **options), expected)


def forwards(model, cache, lengths, prompt, **options):
    """Logits of a prompt with 3 tokens of padding on the left of a sequence, and of what follows it."""
    mask, found = torch.ones(2, 0, dtype=torch.int64), []
    for n in lengths:
        given = prompt(n, pads=3 * (not found))
        mask = torch.cat([mask, given["attention_mask"]], 1)
        with torch.no_grad():
            found.append(model(given["input_ids"], attention_mask=mask, past_key_values=cache, **options).logits)
    return found[0][:, 3:], *found[1:]


CHOICES = {
    "int8 K": {"keys": "int8"},
    "int8 K, dense V, not centred": {"keys": "int8", "values": "dense", "centre_keys": False},
    "dense K": {"keys": "dense"},
    "dense V": {"values": "dense"},
    "not centred": {"centre_keys": False},
    "all of it in the window": {"recent": 300},
    "a window of one": {"recent": 1},
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_formats_and_lengths(model, prompt, choice):
    """A prompt, appends, tokens, a chunk that is larger than a ring, and what follows it."""
    lengths, choice = (9, 5, 1, 64, 1, 90, 1, 3), {"recent": 8, **choice}
    expected = forwards(model, recent_cache(model, **choice), lengths, prompt)
    attnpatch.patch(model, strict=True)
    torch.testing.assert_close(forwards(model, TBQ4Cache(model, **choice), lengths, prompt), expected)
    assert fused(model) == (1, 0, [])


def test_taking_tokens_back(model, prompt):
    """64 are taken back, and the window is what it was; one more, and a token of it is read as its code."""
    caches = recent_cache(model, 5, centre_keys=False), TBQ4Cache(model, recent=5, centre_keys=False)
    logits = [forwards(model, caches[0], (40, 30, 34), prompt)]
    caches[0].crop(-64)
    logits[0] += forwards(model, caches[0], (1, 2), prompt)
    attnpatch.patch(model, strict=True)
    logits.append(forwards(model, caches[1], (40, 30, 34), prompt))
    caches[1].crop(-64)
    before = caches[1].layers[0].keys.clone()
    logits[1] += forwards(model, caches[1], (1, 2), prompt)
    torch.testing.assert_close(*(x[3] for x in logits))
    torch.testing.assert_close(*(x[4] for x in logits))
    assert before.shape[2] == 40


def test_decode_reads_codes(model_with, run, graphs):
    """Two layers: nothing is multiplied out, and what says which tokens are recent is worked out once for both."""
    model = attnpatch.patch(model_with(), strict=True)
    run(model, TBQ4Cache(model, recent=5))
    nodes = list(graphs[-1].graph.nodes)
    names = [op(node) for node in nodes]
    assert not UNPACKING & set(names)
    assert [names.count(x) for x in ("attention", "attention_lse", "merge", "recent_keys")] == [0, 4, 2, 1]
    codes, others = [node for node in nodes if op(node) == "attention_lse"][:2]
    assert value(codes.args[1]).dtype == value(codes.args[2]).dtype == torch.uint8
    assert value(others.args[1]).shape == value(others.args[2]).shape == (2, 2, FIRST + 5, 16)
    capacity = value(codes.args[1]).shape[2]
    dense = [n for n in nodes if isinstance(value(n), torch.Tensor) and value(n).is_floating_point()]
    assert not any(value(n).shape[2:] == (capacity, 16) for n in dense), "K or V of all tokens"
    (site, _) = attnpatch.report(model).sites
    assert site.mask.endswith("TBQ4 K, TBQ4 V, first 4 and last 5 tokens as they were")
    assert sum(d.calls for d in site.dispatches if d.phase == "decode") == 2 * 5


def test_without_recent_tokens_graphs_are_as_they_were(model, run, graphs):
    attnpatch.patch(model, strict=True)
    run(model, TBQ4Cache(model))
    names = [op(node) for node in graphs[-1].graph.nodes]
    assert not {"merge", "recent_keys", "with_recent", "attention_lse"} & set(names)
    assert (names.count("cache_write"), names.count("attention")) == (1, 1)


def test_graphs(model, run, graphs, monkeypatch):
    """As many as without: prefill of one length and of any, and decode, from 16 tokens to 128."""
    monkeypatch.setattr(layers, "FIRST_CAPACITY", 16)
    attnpatch.patch(model, strict=True)
    run(model, TBQ4Cache(model, recent=5), length=12, max_new_tokens=60)
    for length in (100, 30):
        run(model, TBQ4Cache(model, recent=5), length=length)
    assert len(graphs) <= 4
    assert symbols(graphs[1]) == [], "decode before the first growth"


def test_appends_of_any_length(model, prompt, graphs):
    """Of one graph, which knows how many tokens are new only when it runs, and reads codes."""
    expected = forwards(model, recent_cache(model, 5), (9, 3, 7, 5), prompt)
    attnpatch.patch(model, strict=True)
    torch.testing.assert_close(forwards(model, TBQ4Cache(model, recent=5), (9, 3, 7, 5), prompt), expected)
    assert len(graphs) == 2, "the prompt, an append"
    assert symbols(graphs[-1]) != []
    names = {op(node) for node in graphs[-1].graph.nodes}
    assert not UNPACKING & names
    assert "merge" in names


def test_inputs_of_a_step_stay_where_they_are(model, run, graphs):
    attnpatch.patch(model, strict=True)
    run(model, TBQ4Cache(model, recent=5))
    nodes = list(graphs[-1].graph.nodes)
    _, write = (node for node in nodes if op(node) == "cache_write")
    ends = ["key_ring", "value_ring", "position"]
    inputs = [write.args[i] for i in (0, 1, 4)]
    assert [x.op == "placeholder" and x.name.endswith(end) for x, end in zip(inputs, ends, strict=True)] == [True] * 3
    assert not {"item", "tolist", "nonzero", "index_copy"} & {op(node) for node in nodes}


def test_what_is_not_stored_is_not_read(model, run):
    expected = run(model, recent_cache(model, 5), max_new_tokens=9)
    attnpatch.patch(model, strict=True)
    cache = TBQ4Cache(model, recent=5)
    filled = fill_behind(cache, "key_scale", "value_scale", "key_ring", "value_ring")
    assert torch.equal(run(model, cache, max_new_tokens=9), expected)
    assert len(filled) == 4 * 8


def test_steps_are_replayed(model_with, patched, recorder, run):
    expected = run(model_with(num_hidden_layers=1), recent_cache(model_with(num_hidden_layers=1), 5), max_new_tokens=12)
    model = patched()
    assert torch.equal(run(model, TBQ4Cache(model, recent=5), max_new_tokens=12), expected)
    assert (recorder.captures, recorder.replays) == (1, 9)
    assert calls(model, captured=True) == {"decode": 18}


def test_steps_are_begun_ahead():
    chat = Chat()
    cache = chat.steady(lambda model, max_cache_len: TBQ4Cache(model, max_cache_len, recent=5))
    with torch.no_grad():
        chat.check(cache, begun=1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_four_dimensions(model_with, dtype):
    """Of one's own making, which hides one token in the middle and the last of the window."""
    model = model_with(attn_implementation="sdpa" if dtype == torch.bool else "eager", num_hidden_layers=1)
    keep = torch.ones(14, 14, dtype=torch.bool).tril()
    keep[:, 6] = keep[11:, 10] = False
    mask = (keep if dtype == torch.bool else torch.where(keep, 0.0, torch.finfo(dtype).min))[None, None]
    ids, outputs = torch.arange(3, 17)[None], []
    with torch.no_grad():
        for cache in (recent_cache(model, 4), TBQ4Cache(model, recent=4)):
            if isinstance(cache, TBQ4Cache):
                attnpatch.patch(model, strict=True)
            for a, b in ((0, 10), (10, 13), (13, 14)):
                given = {"attention_mask": mask[:, :, a:b, :b], "past_key_values": cache}
                outputs.append(model(ids[:, a:b], **given).logits)
    torch.testing.assert_close(outputs[3:], outputs[:3])


FAMILIES = {
    "Gemma2": {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
    "GptOss": {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.mark.parametrize("centre_keys", [False, True])
@pytest.mark.parametrize(("family", "config"), FAMILIES.items(), ids=FAMILIES)
def test_softcaps_sinks_and_layers_with_a_window(model_with, run, family, config, centre_keys):
    """Centred K is multiplied out beside a softcap or sinks, as it is without recent tokens; V stays codes."""
    model = model_with(family, **config)
    options = {"length": 9, "pads": 2, "max_new_tokens": 9}
    expected = run(model, recent_cache(model, 3, centre_keys=centre_keys), **options)
    attnpatch.patch(model, strict=True)
    assert torch.equal(run(model, TBQ4Cache(model, recent=3, centre_keys=centre_keys), **options), expected)
    assert fused(model) == (2, 0, [])
    masks = " ".join(site.mask for site in attnpatch.report(model).sites)
    assert "TBQ4 V, first 4 and last 3 tokens as they were" in masks
    assert ("K unpacked: a vector is added to all keys" in masks) == centre_keys


def test_alibi(run):
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=64, hidden_size=64, n_layer=1, n_head=4, pad_token_id=0, eos_token_id=None)
    model = BloomForCausalLM(config).eval()
    expected = run(model, recent_cache(model, 3), pads=3, max_new_tokens=12)
    attnpatch.patch(model, strict=True)
    assert torch.equal(run(model, TBQ4Cache(model, recent=3), pads=3, max_new_tokens=12), expected)
    assert fused(model) == (1, 0, [])
