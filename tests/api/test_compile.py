"""torch.compile(backend="attnpatch") and model.compile: options, modes, environment, and what the report says."""

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import attnpatch
from attnpatch.backend import COMPILED
from attnpatch.options import Options, from_compile
from attnpatch.testing.tolerance import assert_same_function, run_float64


@pytest.fixture(autouse=True)
def _fresh_collector(monkeypatch):
    """The graphs of this process' bare compiles, emptied for the test."""
    monkeypatch.setattr(COMPILED, "graphs", [])
    monkeypatch.setattr(COMPILED, "runs", 0)


def refusing(model):
    for layer in model.layers:
        layer.returns_probabilities = True
    return model


def test_named_backend_is_found():
    assert "attnpatch" in torch._dynamo.list_backends()


@pytest.mark.parametrize("how", ["torch.compile", "model.compile"])
def test_same_function_and_report(tiny, ids, how):
    with torch.no_grad():
        original, y64 = tiny(ids), run_float64(tiny, ids)
        if how == "model.compile":
            tiny.compile(backend="attnpatch")
            model = tiny
        else:
            model = torch.compile(tiny, backend="attnpatch")
        assert_same_function(model(ids), original, y64)
    report = attnpatch.report(model)
    assert report.summary["fused"] == 2
    assert [site.module for site in report.sites] == ["layers.0", "layers.1"]
    assert report.sites[0].dispatches[0].calls == 1


def test_function(ids):
    def attend(q, k, v):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    q, k, v = (torch.randn(2, 4, 12, 8) for _ in range(3))
    compiled = torch.compile(attend, backend="attnpatch")
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
    (site,) = attnpatch.report().sites
    assert (site.status, site.module, site.num_heads) == ("fused", "", 4)


def test_report_tells_two_models_apart(tiny_with, ids):
    one, three = tiny_with(layers=1), tiny_with(layers=3)
    for model in (one, three):
        model.compile(backend="attnpatch")
        model(ids)
    assert attnpatch.report(one).summary["fused"] == 1
    assert attnpatch.report(three).summary["fused"] == 3
    assert len(attnpatch.report().sites) == 3  # layers.0 of both is one row


def test_report_of_a_model_without_a_graph(tiny):
    assert "this Tiny is not patched" in attnpatch.report(tiny).note
    tiny.compile(backend="attnpatch")
    assert attnpatch.report(tiny).note == "this Tiny is compiled, but no graph of it went through attnpatch yet"


def test_torch_compile_then_generate_compiles_nothing_and_the_report_says_why(llama_with):
    model = torch.compile(llama_with(layers=1), backend="attnpatch")
    model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2)
    report = attnpatch.report(model)
    assert report.sites == []
    assert "torch.compile(model).generate() runs the original" in report.note


@pytest.mark.parametrize("thing", ["model", 3], ids=["str", "int"])
def test_report_of_what_is_no_module(thing):
    with pytest.raises(TypeError, match=r"report takes a torch\.nn\.Module or nothing"):
        attnpatch.report(thing)


def test_own_options(tiny, ids):
    tiny.compile(backend="attnpatch", options={"backends": "cpu.tiled", "strict": True, "rest": "eager"})
    tiny(ids)
    assert attnpatch.report(tiny).sites[0].dispatches[0].backend == "cpu.tiled"


def test_strict_arrives_inside_torchs_error(tiny, ids):
    """What a backend raises reaches the caller of torch.compile wrapped."""
    refusing(tiny).compile(backend="attnpatch", options={"strict": True})
    with pytest.raises(BackendCompilerFailed) as caught:
        tiny(ids)
    assert isinstance(caught.value.inner_exception, attnpatch.AttentionNotPatched)
    assert len(caught.value.inner_exception.reasons) == 2


def test_named_backend_that_refuses(tiny, ids):
    tiny.compile(backend="attnpatch", options={"backends": ["sdpa.tiled"]})
    with pytest.raises(attnpatch.NoBackend, match=r"sdpa\.tiled: runs on cuda"):
        tiny(ids)


BAD_OPTIONS = {
    "unknown": ({"max_autotun": True}, "unknown option 'max_autotun': neither attnpatch's"),
    "backend": ({"backends": "cpu.fast"}, r"unknown backend 'cpu\.fast'"),
    "rest": ({"rest": "jit"}, "rest='jit'"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options(tiny, ids, options, message):
    tiny.compile(backend="attnpatch", options=options)
    with pytest.raises(BackendCompilerFailed, match=message) as caught:
        tiny(ids)
    assert isinstance(caught.value.inner_exception, ValueError)


def test_inductors_options_go_to_inductor():
    options = from_compile(None, {"max_autotune": True, "shape_padding": False, "strict": True})
    assert dict(options.inductor) == {"max_autotune": True, "shape_padding": False}
    assert (options.strict, options.rest) == (True, "inductor")


def test_mode_implies_inductor():
    from torch._inductor import list_mode_options

    options = from_compile("reduce-overhead", None)
    assert dict(options.inductor) == list_mode_options("reduce-overhead")
    assert options.rest == "inductor"


def test_mode_and_own_options_together():
    """Hugging Face's CompileConfig always sends a mode."""
    options = from_compile("max-autotune-no-cudagraphs", {"backends": "cpu.tiled"})
    assert (options.rest, options.backends) == ("inductor", ("cpu.tiled",))


def test_unknown_mode(tiny, ids):
    tiny.compile(backend="attnpatch", mode="fastest")
    with pytest.raises(Exception, match="fastest"):
        tiny(ids)


def test_defaults():
    options = from_compile(None, None)
    assert (options.strict, options.backends, options.rest, options.inductor) == (False, (), "eager", {})


@pytest.mark.parametrize(("value", "strict"), [("1", True), ("0", False), ("", False)])
def test_environment_strict(monkeypatch, value, strict):
    monkeypatch.setenv("ATTNPATCH_STRICT", value)
    assert Options().strict is strict


def test_environment_strict_raises(monkeypatch, tiny, ids):
    monkeypatch.setenv("ATTNPATCH_STRICT", "1")
    attnpatch.patch(refusing(tiny))
    with pytest.raises(attnpatch.AttentionNotPatched, match="output_attentions"):
        tiny(ids)


def test_argument_wins_over_environment(monkeypatch, tiny, ids):
    monkeypatch.setenv("ATTNPATCH_STRICT", "1")
    monkeypatch.setenv("ATTNPATCH_BACKENDS", "cpu.sdpa")
    attnpatch.patch(tiny, strict=False, backends="cpu.tiled")(ids)
    assert attnpatch.report(tiny).sites[0].dispatches[0].backend == "cpu.tiled"


def test_environment_backends(monkeypatch, tiny, ids):
    monkeypatch.setenv("ATTNPATCH_BACKENDS", "cpu.tiled, cpu.sdpa")
    tiny.compile(backend="attnpatch")
    tiny(ids)
    assert attnpatch.report(tiny).sites[0].dispatches[0].backend == "cpu.tiled"


def test_environment_backends_unknown(monkeypatch, tiny):
    monkeypatch.setenv("ATTNPATCH_BACKENDS", "cpu.fast")
    with pytest.raises(ValueError, match=r"unknown backend 'cpu\.fast'"):
        attnpatch.patch(tiny)


def test_environment_log(monkeypatch, tiny, ids, caplog):
    monkeypatch.setenv("ATTNPATCH_LOG", "ERROR")
    attnpatch.patch(refusing(tiny))(ids)
    assert "stays unfused" not in caplog.text
    monkeypatch.setenv("ATTNPATCH_LOG", "warning")
    attnpatch.unpatch(tiny)
    attnpatch.patch(tiny)(ids)
    assert "stays unfused" in caplog.text


@pytest.mark.parametrize(
    "arguments", [{"options": {"rest": "inductor"}}, {"mode": "reduce-overhead"}], ids=["options", "mode"]
)
def test_rest_inductor(arguments):
    """The rewritten graph goes through Inductor, which asserts the operator's strides, forward and backward."""

    def attend(q, k, v):
        return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(2, 7, -1) + 1.0

    args = [torch.randn(2, 4, 7, 8, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(attend, backend="attnpatch", **arguments)
    y, original = compiled(*args), attend(*args)
    assert_same_function(y, original, run_float64(attend, *args))
    grad = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, args, grad), torch.autograd.grad(original, args, grad), strict=True):
        torch.testing.assert_close(a, b)
    (site,) = attnpatch.report().sites
    assert [(d.backend, d.calls) for d in site.dispatches] == [("cpu.sdpa", 1)]
