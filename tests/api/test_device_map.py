"""Models whose modules run on several devices, or whose weights are on disk: accelerate's hooks become parts of graphs.

A machine without a GPU has one device. Its hooks move nothing, and weights that lie on disk are loaded to it.
"""

import copy
import pickle
from collections import namedtuple

import pytest
import torch
from torch import nn

import attnpatch
from attnpatch.hooked import HookedForward, _moved, without_hooks

accelerate = pytest.importorskip("accelerate")
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_submodules  # noqa: E402


@pytest.fixture
def dispatch(tmp_path):
    """Dispatch a model over places, by the beginning of its modules' names; hooks are on all of them."""

    def place(model, elsewhere=(), **options):
        leaves = [name for name, module in model.named_modules() if not list(module.children())]
        places = {name: "disk" if name.startswith(tuple(elsewhere)) else "cpu" for name in leaves}
        return accelerate.dispatch_model(model, places, offload_dir=tmp_path, force_hooks=True, **options)

    return place


def objects(model):
    """What each module of the model holds, to be compared by identity."""
    return [dict(module.__dict__) for module in model.modules()]


def same_objects(model, before):
    now = objects(model)
    return all(a.keys() == b.keys() and all(a[k] is b[k] for k in a) for a, b in zip(now, before, strict=True))


def places(model):
    return {str(x.device) for x in (*model.parameters(), *model.buffers())}


def hooks(model):
    return [module for module in model.modules() if hasattr(module, "_hf_hook")]


def check(model, graphs=None):
    """Every attention is fused, under its full name, and nothing ran past the patch."""
    report = attnpatch.report(model)
    assert [(site.module, site.status) for site in report.sites] == [("layers.0", "fused"), ("layers.1", "fused")]
    assert report.gaps == []
    assert graphs in (None, report.summary["graphs"])
    return report


@pytest.mark.parametrize("elsewhere", [(), ("embed", "layers.1", "head")], ids=["moves", "disk"])
def test_one_graph_with_every_attention(tiny, ids, dispatch, elsewhere):
    expected = tiny(ids)
    dispatch(tiny, elsewhere)
    assert len(hooks(tiny)) >= len(list(tiny.modules())) - 3  # a ModuleList and two Dropouts have no weights
    assert ("meta" in places(tiny)) == bool(elsewhere)
    before = places(tiny)
    attnpatch.patch(tiny, strict=True)
    for _ in range(3):
        torch.testing.assert_close(tiny(ids), expected)
    report = check(tiny, graphs=1)
    assert [site.dispatches[0].calls for site in report.sites] == [3, 3]
    assert places(tiny) == before


def test_without_a_patch_under_the_hooks_one_attention_would_be_seen(tiny, ids, dispatch, monkeypatch):
    """What the stand-ins are for: Dynamo ends a graph at each hook."""
    monkeypatch.setattr("attnpatch.hooked._hooks_of", lambda module: [])
    dispatch(tiny)
    attnpatch.patch(tiny, strict=True)
    with pytest.raises(attnpatch.AttentionNotPatched, match="graph break at Tiny"):
        tiny(ids)


@pytest.mark.parametrize("elsewhere", [(), ("model.layers.1", "lm_head")], ids=["moves", "disk"])
def test_generate_into_a_buffered_cache(llama_with, dispatch, elsewhere):
    model, ids = llama_with(attn_implementation="sdpa"), torch.arange(3, 23).view(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**inputs)
    dispatch(model, elsewhere, skip_keys=["past_key_values"])
    attnpatch.patch(model, strict=True, cache="buffered")
    assert torch.equal(model.generate(**inputs), expected)
    report = attnpatch.report(model)
    assert [site.module for site in report.sites] == [f"model.layers.{n}.self_attn" for n in range(2)]
    assert [{d.phase: d.calls for d in site.dispatches} for site in report.sites] == [{"prefill": 1, "decode": 3}] * 2
    assert all("causal, padding" in site.mask for site in report.sites)  # read, though it goes through hooks
    assert (report.summary["graphs"], report.gaps) == (2, [])


def test_patched_before_it_is_dispatched(tiny, ids, dispatch):
    expected = tiny(ids)
    attnpatch.patch(tiny, strict=True)
    dispatch(tiny, ["layers.1"])
    torch.testing.assert_close(tiny(ids), expected)
    check(tiny, graphs=1)
    attnpatch.unpatch(tiny)
    assert not any(isinstance(module.__dict__.get("forward"), HookedForward) for module in tiny.modules())


def test_dispatched_between_calls(tiny, ids, dispatch):
    expected = attnpatch.patch(tiny, strict=True)(ids)
    dispatch(tiny, ["layers.0"])
    torch.testing.assert_close(tiny(ids), expected)
    check(tiny, graphs=2)


def test_hooks_removed_between_calls(tiny, ids, dispatch):
    dispatch(tiny, ["layers.1"])
    expected = attnpatch.patch(tiny, strict=True)(ids)
    remove_hook_from_submodules(tiny)
    assert places(tiny) == {"cpu"}
    torch.testing.assert_close(tiny(ids), expected)
    check(tiny, graphs=2)
    before = objects(tiny)
    attnpatch.unpatch(tiny)
    before[0].pop("_compiled_call_impl")
    assert same_objects(tiny, before)


def test_a_hook_added_to_a_part_later_is_a_gap(tiny, ids):
    """Only one on the model itself is noticed, as every function of accelerate leaves it."""
    expected = attnpatch.patch(tiny)(ids)
    add_hook_to_module(tiny.layers[1], AlignDevicesHook(execution_device="cpu"))
    torch.testing.assert_close(tiny(ids), expected)
    assert "graph break" in [gap.kind for gap in attnpatch.report(tiny).gaps]


def test_unpatch_gives_back_the_very_same_objects(tiny, ids, dispatch):
    dispatch(tiny, ["layers.1"])
    before, expected = objects(tiny), tiny(ids)
    attnpatch.patch(tiny)
    assert not same_objects(tiny, before)
    attnpatch.unpatch(tiny)
    now = objects(tiny)
    assert all(a["forward"] is b["forward"] for a, b in zip(now, before, strict=True) if "forward" in b)
    assert [a.keys() for a in now] == [b.keys() for b in before]
    assert torch.equal(tiny(ids), expected)


def test_a_layer_that_was_patched_before_stays_patched(tiny, ids, dispatch):
    dispatch(tiny)
    layer = attnpatch.patch(tiny.layers[0])
    attnpatch.patch(tiny)
    attnpatch.unpatch(tiny)
    assert isinstance(layer.q.forward, HookedForward)
    assert not isinstance(tiny.head.forward, HookedForward)
    attnpatch.unpatch(layer)
    assert not isinstance(layer.q.forward, HookedForward)


class Adapted(nn.Module):
    """Wraps a model as PEFT does."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def get_base_model(self):
        return self.base

    def forward(self, ids):
        return self.base(ids)


def test_wrapper_around_a_dispatched_model(tiny, ids, dispatch):
    """Both are patched; Dynamo meets the patch of the inner one, which its hook has it call as it stands."""
    dispatch(tiny, ["layers.1"])
    model, expected = Adapted(tiny), tiny(ids)
    attnpatch.patch(model, strict=True)
    torch.testing.assert_close(model(ids), expected)
    report = attnpatch.report(model)
    assert [site.module for site in report.sites] == ["base.layers.0", "base.layers.1"]
    assert (report.summary["graphs"], report.gaps) == (1, [])
    torch.testing.assert_close(tiny(ids), expected)
    assert [site.dispatches[0].calls for site in attnpatch.report(model).sites] == [2, 2]


def test_deepcopy_is_unpatched_and_has_its_own_weights(tiny, ids, dispatch):
    expected = tiny(ids)
    dispatch(tiny)
    twin = copy.deepcopy(attnpatch.patch(tiny))
    assert not any(isinstance(module.__dict__.get("forward"), HookedForward) for module in twin.modules())
    with torch.no_grad():
        twin.head.weight.zero_(), twin.head.bias.zero_()
    assert torch.equal(twin(ids), torch.zeros_like(expected))
    torch.testing.assert_close(tiny(ids), expected)


def test_pickle_fails_as_it_does_for_any_model_with_hooks(tiny, dispatch):
    dispatch(tiny)
    with pytest.raises((AttributeError, pickle.PicklingError), match=r"add_hook_to_module\.<locals>\.new_forward"):
        pickle.dumps(tiny)
    attnpatch.patch(tiny)
    with pytest.raises((AttributeError, pickle.PicklingError), match=r"add_hook_to_module\.<locals>\.new_forward"):
        pickle.dumps(tiny)


class Hidden(ModelHook):
    """A hook of somebody else, kept from Dynamo."""

    @torch.compiler.disable
    def pre_forward(self, module, *args, **kwargs):
        return args, kwargs


@pytest.mark.parametrize("append", [False, True], ids=["alone", "after accelerate's"])
def test_a_hook_of_another_kind_is_a_gap(tiny, ids, append):
    expected = tiny(ids)
    if append:
        add_hook_to_module(tiny.layers[0], AlignDevicesHook(execution_device="cpu"))
    add_hook_to_module(tiny.layers[0], Hidden(), append=append)
    with attnpatch.patched(tiny):
        torch.testing.assert_close(tiny(ids), expected)
        assert "graph break" in [gap.kind for gap in attnpatch.report(tiny).gaps]
    with (
        attnpatch.patched(tiny, strict=True),
        pytest.raises(attnpatch.AttentionNotPatched, match="graph break at Tiny"),
    ):
        tiny(ids)


def test_hooks_in_a_row(tiny, ids):
    """One that moves and one that loads, as accelerate chains them."""
    expected = tiny(ids)
    add_hook_to_module(tiny.head, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    accelerate.cpu_offload(tiny, "cpu")
    assert type(tiny.head._hf_hook).__name__ == "SequentialHook"
    torch.testing.assert_close(attnpatch.patch(tiny, strict=True)(ids), expected)
    check(tiny, graphs=1)


def test_outside_of_graphs_the_hooks_themselves_run(tiny, ids, dispatch, monkeypatch):
    dispatch(tiny, ["layers.1"])
    expected = attnpatch.patch(tiny)(ids)
    ran, run = [], AlignDevicesHook.pre_forward
    monkeypatch.setattr(AlignDevicesHook, "pre_forward", lambda *a, **k: ran.append(a[1]) or run(*a, **k))
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(tiny(ids), expected)
    assert len(ran) == len(hooks(tiny))
    assert [gap.kind for gap in attnpatch.report(tiny).gaps] == ["skipped frame"]


class Gained(nn.Module):
    """Attention with a weight of its own, which no module of its own holds."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.gain = inner, nn.Parameter(torch.rand(32))
        self.register_buffer("shift", torch.rand(32))

    def forward(self, x, mask):
        o, p = self.inner(x * self.gain + self.shift, mask)
        return o, p


@pytest.mark.parametrize("options", [{}, {"preload_module_classes": ["Gained"]}], ids=["by part", "as a whole"])
def test_attention_with_weights_of_its_own(tiny, ids, options):
    tiny.layers = nn.ModuleList(Gained(layer) for layer in tiny.layers)
    expected = tiny(ids)
    accelerate.cpu_offload(tiny, "cpu", offload_buffers=True, **options)
    assert places(tiny) == {"meta"}
    torch.testing.assert_close(attnpatch.patch(tiny, strict=True)(ids), expected)
    assert [site.module for site in attnpatch.report(tiny).sites] == ["layers.0.inner", "layers.1.inner"]
    assert places(tiny) == {"meta"}


def test_weights_are_read_at_every_call(tiny, ids):
    """A graph holds no copy of what is elsewhere."""
    accelerate.cpu_offload(tiny, "cpu")
    attnpatch.patch(tiny, strict=True)(ids)
    weights = tiny.head._hf_hook.weights_map
    for name in ("weight", "bias"):
        weights[name].zero_()
    assert torch.equal(tiny(ids), torch.zeros(2, 12, 50))
    assert attnpatch.report(tiny).summary["graphs"] == 1


def test_gradients_through_what_is_elsewhere(tiny, ids, dispatch):
    dispatch(tiny, ["layers.1", "head"])

    def gradient():
        tiny.zero_grad()
        tiny(ids).square().sum().backward()
        return tiny.embed.weight.grad.clone()

    expected = gradient()
    attnpatch.patch(tiny, strict=True)
    torch.testing.assert_close(gradient(), expected)
    check(tiny)


def test_loading_is_an_operator(tiny):
    accelerate.cpu_offload(tiny, "cpu")
    attnpatch.patch(tiny)
    number = tiny.head.forward.hooks[0].number
    arguments = (torch.ones(2), number, "weight", [50, 32], torch.float64, torch.device("cpu"))
    torch.library.opcheck(torch.ops.attnpatch.onloaded.default, arguments)
    loaded = torch.ops.attnpatch.onloaded(*arguments)
    torch.testing.assert_close(loaded, tiny.head._hf_hook.weights_map["weight"].double())


class Made(nn.Module):
    """Adds what it makes on the CPU to nothing of its inputs, whose devices it returns."""

    def forward(self, x, kept=None):
        return {"made": torch.zeros(2), "x": x * 2, "kept": kept}


@pytest.mark.parametrize(
    ("hook", "given", "devices"),
    [
        (AlignDevicesHook("meta"), "cpu", ("cpu", "meta", "meta")),
        (AlignDevicesHook("meta", skip_keys="kept"), "cpu", ("cpu", "meta", "cpu")),
        (AlignDevicesHook(None, io_same_device=True), "meta", ("meta", "meta", "meta")),
        (AlignDevicesHook(None, io_same_device=True, skip_keys=["kept"]), "meta", ("meta", "meta", "cpu")),
    ],
    ids=["in", "in but one", "out", "out but one"],
)
def test_inputs_and_outputs_move(hook, given, devices):
    """To another device, of which the meta device is one: the graph does what the hook does."""
    model = add_hook_to_module(Made(), hook)
    x, kept = torch.ones(2, device=given), torch.ones(2)

    def run():
        return tuple(part.device.type for part in model(x, kept=kept).values())

    assert run() == devices
    attnpatch.patch(model)
    assert run() == devices
    assert [gap.kind for gap in attnpatch.report(model).gaps] == []


def test_what_moves():
    pair, x = namedtuple("pair", "a b"), torch.ones(2)
    meta = torch.device("meta")
    moved = _moved({"a": [x, 3], "cache": x, "pair": pair(x, None)}, meta, "cache")
    assert moved["a"][0].device == meta
    assert (moved["a"][1], moved["cache"], moved["pair"].b) == (3, x, None)
    assert (type(moved["pair"]), moved["pair"].a.device) == (pair, meta)
    assert _moved(x, x.device) is x
    assert _moved([x], None)[0] is x


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("layers.0._old_forward.__self__.attention", "layers.0.attention"),  # torch 2.13
        ("layers.0.forward.module.attention", "layers.0.attention"),  # torch 2.11
        ("_old_forward.__self__.layers.0", "layers.0"),
        ("layers.0.forward.module", "layers.0"),
        ("forward.modules.0", "forward.modules.0"),
    ],
)
def test_names_do_not_go_through_hooks(path, name):
    assert without_hooks(path) == name
