"""Replays begun before a call is understood: taken only by the call they were begun for, and harmless in vain."""

import copy
import threading
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from attnpatch import dispatch
from attnpatch.caches.buffered import BufferedCache
from attnpatch.captured import Inputs
from attnpatch.foreseeing import Plan
from attnpatch.replaying import Replays
from tests.caches.conftest import calls, make_prompt, make_replayed
from tests.caches.recorder import Recorder


class Chat:
    """A model of which decode steps are replayed, and how many of them before torch.compile is asked."""

    def __init__(self, **config):
        self.recorder, self.begun, self.seen = Recorder(), 0, 0
        self.model = make_replayed(self.recorder, **config)
        self.patch = self.model._compiled_call_impl
        compiled = self.patch.compiled

        def watched(*args, **kwargs):
            self.begun += self.recorder.replays - self.seen
            try:
                return compiled(*args, **kwargs)
            finally:
                self.seen = self.recorder.replays

        self.patch.compiled = watched

    def step(self, cache, ids=((5,), (7,)), **arguments):
        return self.model(torch.tensor(ids), past_key_values=cache, **arguments)

    def steady(self, kind=BufferedCache, **arguments):
        """A cache whose steps are begun ahead."""
        cache = kind(self.model, max_cache_len=64)
        with torch.no_grad():
            self.model(make_prompt()["input_ids"], past_key_values=cache)
            for n in range(5):
                self.begun = 0
                self.step(cache, [[n + 4]] * 2, **arguments)
        return cache

    def check(self, cache, begun, run=None, **arguments):
        """A step gives what the unpatched model gives, and the cache then holds the same."""
        plain, stored = copy.deepcopy((self.model, cache))
        expected = plain(torch.tensor(((5,), (7,))), past_key_values=stored, **arguments).logits
        self.begun = 0
        torch.testing.assert_close(self.step(cache, **arguments).logits, expected)
        assert self.begun == begun
        assert cache.get_seq_length() == stored.get_seq_length()
        for ours, theirs in zip(cache.layers, stored.layers, strict=True):
            torch.testing.assert_close((ours.keys, ours.values), (theirs.keys, theirs.values))


@pytest.fixture(scope="module", autouse=True)
def _clean_dynamo():
    """Once for all tests here: they share one model's graphs."""
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def chat():
    return Chat()


def test_a_step_is_begun_before_it_is_known_and_counted_once(chat):
    cache = chat.steady()
    replays, runs = chat.recorder.replays, chat.patch.collector.runs
    with torch.no_grad():
        chat.check(cache, begun=1)
    assert (chat.recorder.replays, chat.patch.collector.runs) == (replays + 1, runs + 1)
    assert calls(chat.model, captured=True)["decode"] == chat.recorder.replays


@contextmanager
def put(owner, name, new):
    """``new`` in place of an attribute."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


@contextmanager
def trained(model):
    model.train()
    try:
        yield
    finally:
        model.eval()


@contextmanager
def hooked(model):
    handle = block(model).mlp.register_forward_hook(lambda module, args, output: output * 2)
    try:
        yield
    finally:
        handle.remove()


def block(model):
    return model.model.layers[0]


def negated(model):
    return nn.Parameter(-block(model).mlp.down_proj.weight.detach())


CHANGES = {
    "another weight": (lambda m: put(block(m).mlp.down_proj, "weight", negated(m)), 1),
    "a weight's memory": (lambda m: put(block(m).mlp.down_proj.weight, "data", negated(m).data), 0),
    "another module": (lambda m: put(block(m).mlp, "act_fn", nn.ReLU()), 1),
    "the config": (lambda m: put(m.config, "_attn_implementation", "sdpa"), 1),
    "training": (trained, 1),
    "a hook": (hooked, 1),
    "inference mode": (lambda m: torch.inference_mode(), 1),
    "gradients": (lambda m: torch.enable_grad(), 0),
}
"""What a user may do between two calls, and whether it shows only when the step is begun."""


@pytest.mark.parametrize(("change", "begun"), CHANGES.values(), ids=CHANGES)
def test_what_changed_is_noticed(chat, change, begun):
    cache = chat.steady()
    with torch.no_grad(), change(chat.model):
        chat.check(cache, begun)
        chat.check(cache, begun=0)


@torch.no_grad()
def test_a_number_that_changed_is_noticed():
    """It becomes an input of graphs, which is made at each call: no later call is foreseen."""
    chat = Chat()
    with put(block(chat.model).self_attn, "scaling", 0.5):
        cache = chat.steady()
    chat.check(cache, begun=1)
    chat.check(chat.steady(), begun=0)


def test_weights_and_masks_written_in_place_are_read(chat):
    cache, weight = chat.steady(), block(chat.model).mlp.down_proj.weight
    mask = torch.ones(2, 15, dtype=torch.int64)
    mask[0, :3] = 0
    with torch.no_grad():
        weight.neg_()
        chat.check(cache, begun=1, attention_mask=mask)
        weight.neg_()


def test_a_cropped_cache_goes_on_where_it_ends(chat):
    cache = chat.steady()
    cache.crop(-2)
    with torch.no_grad():
        chat.check(cache, begun=1)


@torch.no_grad()
def test_nothing_is_written_to_another_cache(chat):
    """Its last token would be overwritten."""
    cache = chat.steady()
    before = copy.deepcopy(cache)
    chat.check(copy.deepcopy(cache), begun=0)
    for ours, theirs in zip(cache.layers, before.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)


@torch.no_grad()
def test_nothing_is_written_to_a_buffer_that_the_cache_let_go(chat):
    cache = chat.steady()
    (layer,) = cache.layers
    given, layer.key_buffer = layer.key_buffer, layer.key_buffer.clone()
    before = given.clone()
    chat.check(cache, begun=0)
    assert torch.equal(given, before)


@torch.no_grad()
def test_more_tokens_than_foreseen(chat):
    cache = chat.steady()
    chat.begun = 0
    chat.step(cache, [[5, 6]] * 2)
    assert (chat.begun, cache.get_seq_length()) == (0, 16)


@torch.no_grad()
def test_a_smaller_weight_at_the_same_place_is_not_read(chat):
    """What lies behind it need not be memory."""
    cache, weight = chat.steady(), block(chat.model).mlp.down_proj.weight
    before = chat.recorder.replays
    with put(weight, "data", weight.data.view(-1)[:64].view(1, 64)), pytest.raises(RuntimeError):
        chat.step(cache)
    assert chat.recorder.replays == before


@torch.no_grad()
def test_nothing_is_begun_where_python_runs_between_graphs(chat):
    """It could change what was begun."""
    cache = chat.steady()
    with put(chat.patch.collector, "gaps", Counter({("graph break", "here"): 1})):
        chat.check(cache, begun=0)


@torch.no_grad()
def test_a_call_that_fails_leaves_nothing_begun(chat):
    cache = chat.steady()
    with put(chat.patch, "compiled", lambda *args, **kwargs: 1 / 0), pytest.raises(ZeroDivisionError):
        chat.step(cache)
    assert chat.patch.collector.replays.course is None
    chat.seen = chat.recorder.replays
    chat.check(cache, begun=0)
    chat.check(cache, begun=1)


class Cache:
    """One that holds every buffer."""

    def holds(self, ids):
        return True


def stepped(recorder, function=lambda x, cache: (x * 2,), kept=1):
    """A step of two inputs, one copied and one kept, of which one call is captured."""
    replays = Replays(recorder, "cpu")
    tensors = [torch.ones(2), *(torch.ones(3) for _ in range(kept))]
    inputs = Inputs(tuple(range(1, kept + 1)), (0,), (), caches=(1,))
    step = replays.step(lambda *args: _decoded(function(*args)), inputs, tensors)
    for _ in range(2):
        with torch.no_grad(), dispatch.recording():
            step(*tensors)
    assert recorder.captures == 1
    return replays, step, tensors


def _decoded(outputs):
    """``outputs``, as if an attention had run."""
    dispatch._current.recording.dispatches.append(dispatch.Dispatch("decode", "cpu.sdpa", ""))
    return outputs


def begun(replays, step, tensors, recorder):
    """Whether the second of two calls is begun ahead."""
    cache, before = Cache(), 0
    for _ in range(2):
        with torch.no_grad(), dispatch.recording(), replays.ahead({"x": tensors[0]}, cache):
            before = recorder.replays
            step(*tensors)
    after = recorder.replays
    return (before, after) == (2, 2)


def drawing(x, cache):
    return (x * torch.rand(2),)


def writing(x, cache, other):
    other.add_(1)
    return (x * 2,)


def test_a_step_is_begun_ahead_only_if_twice_is_as_once(recorder):
    assert begun(*stepped(recorder), recorder)


@pytest.mark.parametrize(("function", "kept"), [(drawing, 1), (writing, 2)], ids=["draws", "writes"])
def test_what_draws_or_writes_is_not_begun_ahead(recorder, function, kept):
    assert not begun(*stepped(recorder, function, kept), recorder)


def test_a_second_thread_runs_beside_a_call_that_is_begun(recorder):
    replays, step, tensors = stepped(recorder)
    seen = []

    def beside():
        with torch.no_grad(), dispatch.recording():
            seen.append(step(*tensors)[0].tolist())

    with torch.no_grad(), replays.ahead({}, Cache()):
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join(timeout=10)
    assert (seen, recorder.replays) == ([[2.0, 2.0]], 0)


def test_a_plan_keeps_nothing_alive(recorder):
    _, step, (x, weight) = stepped(recorder)
    recorder, captured, cache = None, step._captured, Cache()
    plan = Plan(captured, [x, weight], {"x": x})
    assert plan.foresee({"x": x}, cache) is not None
    assert plan.foresee({}, cache) is None
    step._captured._replay = None  # of the recorder, which holds on to the inputs
    del weight
    assert plan.foresee({"x": x}, cache) is None
    del captured
    step.release()
    assert plan._captured() is None
