"""What a cache costs a model, against the same worked out by hand."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

import attnpatch
from attnpatch import tbq4
from tests.caches.conftest import make_model
from tests.caches.simulated import ROUND, simulated_cache

IDS = torch.randint(3, 60, (1, 140), generator=torch.Generator().manual_seed(1))


def perplexity(model, cache):
    loss = []
    with torch.no_grad():
        for group in (slice(0, 64), slice(64, 128), slice(128, 139)):
            logits = model(IDS[:, group], past_key_values=cache).logits[0].double()
            labels = IDS[0, 1:][group]
            loss.append(-logits.log_softmax(-1)[torch.arange(len(labels)), labels])
    return torch.cat(loss[1:]).mean().exp().item()


@pytest.mark.parametrize("choice", [{}, {"keys": "int8"}, {"centre_keys": True}], ids=str)
def test_perplexity(choice):
    model = make_model(num_hidden_layers=3)
    found = tbq4.probe(model, IDS, **choice, skip_layers=("last",))
    assert found.tokens == 75
    assert found.exact == pytest.approx(perplexity(model, DynamicCache(config=model.config)), rel=1e-5)
    assert found.perplexity == pytest.approx(perplexity(model, simulated_cache(model, {2}, **choice)), rel=1e-5)
    assert found.perplexity != found.exact
    assert found.ratio == found.perplexity / found.exact
    keys = choice.get("keys", "tbq4")
    assert [(x.layer, x.keys, x.values) for x in found.layers] == [
        (0, keys, "tbq4"),
        (1, keys, "tbq4"),
        (2, *2 * ["dense"]),
    ]
    assert found.layers[0].error > 0.01
    assert found.layers[2].error == 0, "its inputs are the exact ones"


def test_the_error_of_a_layer():
    """Of its attention's output after the projection, over keys and values that are rounded by hand."""
    model = make_model(num_hidden_layers=1)
    seen = []
    attention = model.model.layers[0].self_attn
    hook = attention.register_forward_hook(lambda *args: seen.append(args[3][0]), with_kwargs=True)
    rounded = DynamicCache(config=model.config)
    update = rounded.update
    for cache in (DynamicCache(config=model.config), rounded):
        if cache is rounded:
            cache.update = lambda k, v, *args: update(ROUND["tbq4"](k), ROUND["tbq4"](v), *args)
        with torch.no_grad():
            model(IDS[:, :-1], past_key_values=cache)
    hook.remove()
    exact, got = (x[:, 64:] for x in seen)
    (layer,) = tbq4.probe(model, IDS, centre_keys=False).layers
    expected = (got - exact).norm() / exact.norm()
    assert layer.error == pytest.approx(expected.item(), rel=1e-4)


def test_nothing_rounded_costs_nothing():
    found = tbq4.probe(make_model(), IDS, keys="dense", values="dense")
    assert (found.ratio, [x.error for x in found.layers]) == (1.0, [0.0, 0.0])


def test_patched_models_run_as_they_are():
    model = make_model(num_hidden_layers=1)
    expected = tbq4.probe(model, IDS)
    attnpatch.patch(model, cache="tbq4")
    assert tbq4.probe(model, IDS) == expected
    assert attnpatch.report(model).sites == []
    assert not model.model.layers[0].self_attn._forward_hooks


def test_layers_with_a_window_are_not_listed():
    model = make_model("Gemma2", sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    assert [x.layer for x in tbq4.probe(model, IDS).layers] == [1]


def test_a_text():
    model, given = make_model(num_hidden_layers=1), []

    def tokenizer(text, return_tensors):
        given.append((text, return_tensors))
        return {"input_ids": IDS}

    assert tbq4.probe(model, "so it goes", tokenizer) == tbq4.probe(model, IDS)
    assert given == [("so it goes", "pt")]


def test_print():
    costs = (tbq4.probing.LayerCost(0, "tbq4", "dense", 0.0123), tbq4.probing.LayerCost(11, "dense", "dense", 0.0))
    text = str(tbq4.probing.Probe(costs, 99, 20.0, 21.0))
    lines = [line.replace("│", " ").split() for line in text.splitlines()]
    assert ["0", "tbq4", "dense", "1.2%"] in lines
    assert ["11", "dense", "dense", "0.0%"] in lines
    assert text.splitlines()[-1] == "perplexity x 1.0500: 20.000 becomes 21.000 (99 tokens)"


def test_bad_input():
    model = make_model(num_hidden_layers=1)
    with pytest.raises(ValueError, match="needs the tokenizer of a text"):
        tbq4.probe(model, "text")
    for shape in ((1, 65), (2, 99), (99,)):
        with pytest.raises(ValueError, match=r"one sequence of 66 tokens or more.*got ids of shape \("):
            tbq4.probe(model, torch.ones(shape, dtype=torch.int64))
    with pytest.raises(ValueError, match="keys='int4'"):
        tbq4.probe(model, IDS, keys="int4")
