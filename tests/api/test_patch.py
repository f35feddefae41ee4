"""patch and unpatch: reversible, in place, and invisible to whatever else is done with a model."""

import copy
import io
import logging
import pickle

import pytest
import torch
from torch import nn

import attnpatch
from attnpatch import patching
from attnpatch.testing.tolerance import assert_same_function, run_float64


def fused(model):
    """(fused, refused) of the model's report."""
    summary = attnpatch.report(model).summary
    return summary["fused"], summary["refused"]


def test_patched_model_is_the_same_function(tiny, ids):
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    with torch.no_grad():
        original, y64 = tiny(ids, padding), run_float64(tiny, ids, padding)
        assert attnpatch.patch(tiny) is tiny
        y = tiny(ids, padding)
    assert_same_function(y, original, y64, padding.bool())
    assert fused(tiny) == (2, 0)


def test_each_layer_is_a_site_with_its_path(tiny, ids):
    attnpatch.patch(tiny)(ids)
    assert [site.module for site in attnpatch.report(tiny).sites] == ["layers.0", "layers.1"]


def test_unpatch_gives_back_bit_identical_outputs_and_the_object(tiny, ids):
    before, state = tiny(ids), dict(tiny.__dict__)
    attnpatch.patch(tiny)(ids)
    assert attnpatch.unpatch(tiny) is tiny
    assert torch.equal(tiny(ids), before)
    assert tiny.__dict__ == state


def test_patch_again_after_unpatch(tiny, ids):
    for _ in range(2):
        attnpatch.patch(tiny)(ids)
        assert fused(tiny) == (2, 0)
        attnpatch.unpatch(tiny)


def test_context_manager(tiny, ids):
    with attnpatch.patched(tiny, backends="cpu.tiled") as model:
        assert model is tiny
        tiny(ids)
        assert attnpatch.report(tiny).sites[0].dispatches[0].backend == "cpu.tiled"
    assert "_compiled_call_impl" not in tiny.__dict__


def test_context_manager_unpatches_after_an_error(tiny):
    with pytest.raises(RuntimeError, match="inside"), attnpatch.patched(tiny):
        raise RuntimeError("inside")
    assert "_compiled_call_impl" not in tiny.__dict__


def test_patching_twice(tiny):
    attnpatch.patch(tiny)
    with pytest.raises(ValueError, match=r"this Tiny is patched already; call attnpatch\.unpatch"):
        attnpatch.patch(tiny)


def test_unpatching_what_is_not_patched(tiny):
    with pytest.raises(ValueError, match="this Tiny is not patched"):
        attnpatch.unpatch(tiny)


def test_unpatching_what_is_merely_compiled(tiny):
    tiny.compile(backend="eager")
    with pytest.raises(ValueError, match="not patched"):
        attnpatch.unpatch(tiny)
    assert tiny._compiled_call_impl is not None


@pytest.mark.parametrize("thing", [None, "model", lambda x: x, nn.Linear], ids=["none", "str", "function", "class"])
def test_patching_what_is_no_module(thing):
    with pytest.raises(TypeError, match=r"patch takes a torch\.nn\.Module, not"):
        attnpatch.patch(thing)


def test_patching_what_torch_compile_returned(tiny):
    with pytest.raises(TypeError, match="patch takes the model itself"):
        attnpatch.patch(torch.compile(tiny))


def test_unknown_option(tiny):
    with pytest.raises(TypeError, match="unknown option 'strct'; the options are strict, backends"):
        attnpatch.patch(tiny, strct=True)
    assert "_compiled_call_impl" not in tiny.__dict__


BAD_VALUES = {
    "backend": ({"backends": "cpu.fast"}, r"unknown backend 'cpu\.fast'; the backends are cpu\.sdpa"),
    "one_of_two": ({"backends": ["cpu.sdpa", "x"]}, "unknown backend 'x'"),
    "rest": ({"rest": "jit"}, "rest='jit' is neither 'eager' nor 'inductor'"),
    "log_level": ({"log_level": "loud"}, "log_level='loud' is none of debug, info, warning, error"),
}


@pytest.mark.parametrize(("options", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_values(tiny, options, message):
    with pytest.raises(ValueError, match=message):
        attnpatch.patch(tiny, **options)
    assert "_compiled_call_impl" not in tiny.__dict__


def test_previous_compile_is_put_back(tiny, ids):
    calls = []

    def backend(gm, example_inputs):
        calls.append(gm)
        return gm.forward

    tiny.compile(backend=backend)
    installed = tiny._compiled_call_impl
    attnpatch.patch(tiny)(ids)
    assert calls == []
    attnpatch.unpatch(tiny)
    assert tiny._compiled_call_impl is installed
    tiny(ids)
    assert len(calls) == 1


def test_state_dict_is_unchanged(tiny, ids):
    before = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    attnpatch.patch(tiny)(ids)
    after = tiny.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [n for n, _ in tiny.named_modules()] == [n for n, _ in copy.deepcopy(tiny).named_modules()]


def test_loaded_weights_are_used(tiny, tiny_with, ids):
    torch.manual_seed(9)
    other = type(tiny)().eval()
    attnpatch.patch(tiny)(ids)
    tiny.load_state_dict(other.state_dict())
    torch.testing.assert_close(tiny(ids), other(ids))


def test_deepcopy_is_unpatched_and_has_its_own_weights(tiny, ids):
    attnpatch.patch(tiny)
    y = tiny(ids)
    twin = copy.deepcopy(tiny)
    with torch.no_grad():
        twin.head.weight.zero_(), twin.head.bias.zero_()
    assert torch.equal(twin(ids), torch.zeros_like(y))
    torch.testing.assert_close(tiny(ids), y)
    report = attnpatch.report(twin)
    assert report.sites == []
    assert "this Tiny is not patched" in report.note
    assert "deepcopy or an unpickled model starts unpatched" in report.note
    attnpatch.patch(twin)(ids)
    assert fused(twin) == (2, 0)


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_pickled_model_comes_back_unpatched(llama_with, how):
    model, ids = attnpatch.patch(llama_with(layers=1)), torch.arange(1, 9)[None]
    y = model(ids).logits
    if how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, buffer := io.BytesIO())
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    torch.testing.assert_close(twin(ids).logits, y)
    assert "not patched" in attnpatch.report(twin).note
    assert fused(model) == (1, 0)


def test_save_pretrained_while_patched(llama_with, tmp_path):
    model, ids = llama_with(layers=1), torch.arange(1, 9)[None]
    model.save_pretrained(tmp_path / "before")
    attnpatch.patch(model)(ids)
    model.save_pretrained(tmp_path / "patched")
    before, after = (sorted((tmp_path / d).iterdir()) for d in ("before", "patched"))
    assert [f.name for f in before] == [f.name for f in after]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(before, after, strict=True))
    twin = type(model).from_pretrained(tmp_path / "patched")
    torch.testing.assert_close(twin(ids).logits, model(ids).logits)


def test_train_and_eval(tiny_with, ids, caplog):
    """Active dropout is refused and runs as the model says; eval fuses again."""
    model = attnpatch.patch(tiny_with(dropout=0.5))
    with caplog.at_level(logging.WARNING, "attnpatch"):
        model.train()
        first, second = model(ids), model(ids)
    assert not torch.equal(first, second)
    assert fused(model) == (0, 2)
    assert "dropout with p=0.5 is active in training" in attnpatch.report(model).sites[0].reason
    assert "attention stays unfused: layers.0: dropout" in caplog.text
    model.eval()
    torch.testing.assert_close(model(ids), model._call_impl(ids))
    assert [d.backend for d in attnpatch.report(model).sites[0].dispatches] == ["cpu.sdpa"]


def test_moved_to_another_dtype(tiny, ids):
    """The mask is float32, so the scores of a bfloat16 model are too: that is what the graph says."""
    attnpatch.patch(tiny)(ids)
    tiny.double()
    y = tiny(ids)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, tiny._call_impl(ids))
    assert fused(tiny) == (2, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_llama(llama_with, dtype):
    model, ids = llama_with(layers=1).to(dtype), torch.arange(1, 13)[None]
    with torch.no_grad():
        original, y64 = model(ids).logits, run_float64(model, ids).logits
        y = attnpatch.patch(model)(ids).logits
    assert_same_function(y, original, y64)
    assert attnpatch.report(model).sites[0].dtype == str(dtype).removeprefix("torch.")


def test_hooks_fire_once_per_call(tiny, ids):
    calls = []
    tiny.register_forward_pre_hook(lambda module, args: calls.append("pre"))
    tiny.register_forward_hook(lambda module, args, output: calls.append("post"))
    attnpatch.patch(tiny)
    for _ in range(3):
        tiny(ids)
    assert calls == ["pre", "post"] * 3
    assert fused(tiny) == (2, 0)


def test_hook_that_changes_the_output(tiny, ids):
    tiny.register_forward_hook(lambda module, args, output: output + 1.0)
    y = tiny(ids)
    torch.testing.assert_close(attnpatch.patch(tiny)(ids), y)


def test_two_models_do_not_share_anything(tiny_with, ids):
    models = [attnpatch.patch(tiny_with(layers=n)) for n in (1, 3)]
    for model in models:
        model(ids)
    assert [fused(model) for model in models] == [(1, 0), (3, 0)]
    attnpatch.unpatch(models[0])
    models[1](ids)
    assert attnpatch.report(models[1]).sites[0].dispatches[0].calls == 2


def test_five_models_of_different_depth_at_two_lengths(tiny_with):
    """They share one code object, as all Hugging Face models do, and Dynamo's limit of 8 is per code object."""
    models = [attnpatch.patch(tiny_with(layers=n), strict=True) for n in range(1, 6)]
    for model in models:
        for length in (9, 12):
            model(torch.ones(2, length, dtype=torch.long))
    for depth, model in enumerate(models, start=1):
        report = attnpatch.report(model)
        assert (len(report.sites), report.gaps) == (depth, [])
        assert all(site.status == "fused" and sum(d.calls for d in site.dispatches) == 2 for site in report.sites)


def test_a_submodule_alone(tiny):
    """Patching the attention itself is allowed: its site has no path of its own."""
    layer, x, mask = tiny.layers[0], torch.randn(2, 5, 32), torch.zeros(5, 5)
    expected = layer(x, mask)[0]
    attnpatch.patch(layer)
    torch.testing.assert_close(layer(x, mask)[0], expected)
    assert fused(layer) == (1, 0)


def test_errors_of_the_model_reach_the_caller(tiny):
    attnpatch.patch(tiny)
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        tiny(torch.full((1, 3), 99))


def test_inference_mode_and_grad_mode(tiny, ids):
    attnpatch.patch(tiny)
    with torch.inference_mode():
        inference = tiny(ids)
    with torch.no_grad():
        without = tiny(ids)
    torch.testing.assert_close(inference, without)
    torch.testing.assert_close(tiny(ids), without)
    assert fused(tiny) == (2, 0)


def test_output_attentions_are_refused_with_the_reason(tiny, ids):
    for layer in tiny.layers:
        layer.returns_probabilities = True
    logits, probabilities = tiny(ids)
    attnpatch.patch(tiny)
    y, p = tiny(ids)
    assert torch.equal(y, logits)
    assert torch.equal(p[1], probabilities[1])
    report = attnpatch.report(tiny)
    assert [site.status for site in report.sites] == ["refused", "refused"]
    assert "they are returned (output_attentions)" in report.sites[0].reason


def test_strict_raises_from_a_patched_model_unwrapped(tiny, ids):
    tiny.layers[1].returns_probabilities = True
    attnpatch.patch(tiny, strict=True)
    with pytest.raises(attnpatch.AttentionNotPatched, match=r"layers\.1: .*output_attentions") as caught:
        tiny(ids)
    assert len(caught.value.reasons) == 1
    assert str(caught.value).startswith("attention stays unfused (strict=True):\n  - layers.1")
    assert pickle.loads(pickle.dumps(caught.value)).reasons == caught.value.reasons


def test_strict_raises_again_at_the_next_call(tiny, ids):
    tiny.layers[1].returns_probabilities = True
    attnpatch.patch(tiny, strict=True)
    for _ in range(2):
        with pytest.raises(attnpatch.AttentionNotPatched):
            tiny(ids)


def test_strict_passes_when_all_is_fused(tiny, ids):
    attnpatch.patch(tiny, strict=True)(ids)
    assert fused(tiny) == (2, 0)


def test_named_backend_that_refuses_is_an_error(tiny, ids):
    """Nothing on a CPU runs a CUDA backend, and a name never falls back."""
    attnpatch.patch(tiny, backends=["sdpa.blocked"])
    with pytest.raises(attnpatch.NoBackend, match=r"no backend runs .*sdpa\.blocked: runs on cuda, not cpu"):
        tiny(ids)


@pytest.mark.parametrize("names", ["cpu.tiled", ["cpu.tiled"], ("cpu.tiled", "cpu.sdpa"), " cpu.tiled , cpu.sdpa"])
def test_named_backends_run_in_order(tiny, ids, names):
    expected = tiny(ids)
    attnpatch.patch(tiny, backends=names)
    torch.testing.assert_close(tiny(ids), expected)
    (dispatch,) = attnpatch.report(tiny).sites[0].dispatches
    assert (dispatch.backend, dispatch.reason, dispatch.calls) == ("cpu.tiled", "first choice", 1)


def test_one_code_object_per_model():
    codes = {patching._own_code(i).__code__ for i in range(3)}
    assert len(codes) == 3
