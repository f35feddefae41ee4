"""The rest of a graph on a GPU: norms, rotary embeddings and linear layers of one row are one kernel each."""

import pytest
import torch
import torch.nn.functional as F

import attnpatch
from attnpatch import backend
from attnpatch.testing.tolerance import assert_same_function, run_float64
from tests.caches.conftest import generate, make_model

COUNTED = {
    F.rms_norm: "norms",
    torch.ops.attnpatch.rotary.default: "turns",
    torch.ops.attnpatch.linear.default: "linears",
    F.linear: "layers",
}

FAMILIES = {
    "Llama": {"norms": 5, "turns": 2},
    "Mistral": {"norms": 5, "turns": 2},
    "Qwen3": {"norms": 9, "turns": 2},  # of every query and key, too
    "Phi3": {"norms": 5, "turns": 2},
    "Olmo2": {"norms": 9, "turns": 2},
    "Gemma2": {"norms": 9, "turns": 2},
    "Starcoder2": {"turns": 2},
}


@pytest.fixture
def graphs(monkeypatch, request):
    """What the graphs of a model call, as on a GPU."""
    found, uncounted = [], getattr(request, "param", ["layers"])

    def counted(gm, *args):
        result = compile_rest(gm, *args)
        names = [COUNTED[node.target] for node in gm.graph.nodes if node.target in COUNTED]
        found.append({name: names.count(name) for name in dict.fromkeys(names) if name not in uncounted})
        return result

    compile_rest = backend._compile_rest
    monkeypatch.setattr(backend, "_is_on_gpu", lambda inputs: True)
    monkeypatch.setattr(backend, "_compile_rest", counted)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model(graphs, family):
    model, ids = make_model(family), torch.arange(3, 13)[None]
    with torch.no_grad():
        original, exact = model(ids).logits, run_float64(model, ids).logits
        attnpatch.patch(model, strict=True, cuda_graphs=False, cache=None)
        assert_same_function(model(ids).logits, original, exact)
    assert graphs == [FAMILIES[family]]


def test_text_is_that_of_the_unpatched_model(graphs):
    expected = generate(make_model(num_hidden_layers=1), None)
    model = attnpatch.patch(make_model(num_hidden_layers=1), strict=True, cuda_graphs=False, cache="buffered")
    assert torch.equal(generate(model, None), expected)
    assert graphs == [{"norms": 3, "turns": 1}] * 2  # prefill and decode


def test_gradients_are_of_the_models_own_operators(graphs):
    ids = torch.arange(3, 13)[None]
    grads = []
    for patched in (False, True):
        model = make_model()
        if patched:
            attnpatch.patch(model, strict=True, cuda_graphs=False, cache=None)
        model(ids, labels=ids).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads)
    assert graphs == [{}]


DECODE = {
    "Llama": {"linears": 9, "turns": 2, "norms": 1},  # the last norm, of which the head reads a slice
    "Mistral": {"linears": 9, "turns": 2, "norms": 1},
    "Qwen3": {"linears": 9, "turns": 2, "norms": 5},
    "Phi3": {"linears": 9, "turns": 2, "norms": 1},  # gate and up are halves of one layer
    "Olmo2": {"linears": 9, "norms": 9},  # behind the layers; it turns queries and keys in float32
    "Gemma2": {"linears": 9, "turns": 2},  # it norms in float32, with one plus a weight
    "Starcoder2": {"linears": 9, "turns": 2},  # dropouts before its residuals drop nothing
}


@pytest.mark.parametrize("graphs", [[]], indirect=True, ids=["every layer counted"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step(graphs, family):
    model, ids = make_model(family).bfloat16(), torch.arange(3, 13)[None]
    with torch.no_grad():
        original, exact = model(ids).logits[:, -1], run_float64(model, ids).logits[:, -1]
        attnpatch.patch(model, strict=True, cuda_graphs=False, cache=None)
        cache = model(ids[:, :9], use_cache=True).past_key_values
        assert_same_function(model(ids[:, 9:], past_key_values=cache).logits[:, -1], original, exact)
    assert graphs[-1] == DECODE[family]


def test_inductor_fuses_the_others_by_itself(graphs):
    model = attnpatch.patch(make_model(num_hidden_layers=1), rest="inductor", cuda_graphs=False, cache=None)
    with torch.no_grad():
        model(torch.arange(3, 13)[None])
    assert graphs == [{"norms": 3}]


def test_on_a_cpu_the_graph_is_left_as_it_is(graphs, monkeypatch):
    monkeypatch.setattr(backend, "_is_on_gpu", lambda inputs: False)
    model = attnpatch.patch(make_model(num_hidden_layers=1), cache=None)
    with torch.no_grad():
        model(torch.arange(3, 13)[None])
    assert graphs == [{}]


def with_gradients(ids, model):
    with torch.enable_grad():
        return model(ids).logits.square().mean()


def in_autocast(ids, model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(ids).logits.square().mean()


@pytest.mark.parametrize("call", [with_gradients, in_autocast])
def test_modes_inside_of_a_graph(graphs, call):
    """What a graph of a caller without gradients does with them, or in dtypes of its own, is left to it."""
    model, ids = make_model(num_hidden_layers=1), torch.arange(3, 13)[None]
    compiled = torch.compile(lambda ids: call(ids, model), backend="attnpatch")
    with torch.no_grad():
        loss = compiled(ids)
    assert graphs
    assert not any(graphs)
    if call is with_gradients:
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
