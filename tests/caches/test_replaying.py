"""Steps replayed from CUDA graphs, with a recorder that does on a CPU what a CUDA graph does on a device."""

import itertools
import threading
import types
from contextlib import nullcontext
from operator import attrgetter

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.cache_utils import DynamicCache, StaticCache

import attnpatch
from attnpatch import dispatch
from attnpatch.caches import layers
from attnpatch.caches.buffered import BufferedCache
from attnpatch.captured import Inputs
from attnpatch.options import from_compile
from attnpatch.replaying import ReplayedStep, Replays
from attnpatch.reporting import GraphRecord
from attnpatch.rewriter import SiteRecord
from tests.caches.conftest import MODES, calls


def test_a_decode_is_replayed_from_its_third_step_on(model_with, patched, recorder, run):
    expected = run(model_with(num_hidden_layers=1), None, max_new_tokens=12)
    model = patched()
    assert torch.equal(run(model, BufferedCache(model), max_new_tokens=12), expected)
    assert (recorder.captures, recorder.replays) == (1, 9)
    assert calls(model, captured=False) == {"prefill": 1, "decode": 2}
    assert calls(model, captured=True) == {"decode": 9}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_tokens_are_those_of_the_unpatched_model(model_with, patched, recorder, run, mode):
    mode = {"max_new_tokens": 14, **mode}
    expected = run(model_with(num_hidden_layers=1), None, **mode)
    model = patched()
    assert torch.equal(run(model, BufferedCache(model), **mode), expected)
    assert recorder.replays > 0


def test_every_new_cache_and_every_growth_is_captured_anew(model_with, patched, recorder, run, monkeypatch):
    monkeypatch.setattr(layers, "FIRST_CAPACITY", 16)
    plain, model = model_with(num_hidden_layers=1), patched()
    for n in (1, 2):
        expected = run(plain, None, length=12, max_new_tokens=40)
        assert torch.equal(run(model, BufferedCache(model), length=12, max_new_tokens=40), expected)
        assert recorder.captures == 3 * n, "capacities of 16, 32 and 64"
    assert recorder.replays == 2 * (39 - 3 * 2)


def test_a_change_of_batch(model_with, patched, recorder, run):
    plain, model = model_with(num_hidden_layers=1), patched()
    for n, batch in enumerate((2, 1, 3), start=1):
        expected = run(plain, None, batch=batch, max_new_tokens=8)
        assert torch.equal(run(model, BufferedCache(model), batch=batch, max_new_tokens=8), expected)
        assert (recorder.captures, recorder.replays) == (n, 5 * n)


def test_two_conversations_in_turn_are_not_captured_again_and_again(patched, recorder, prompt):
    model = patched()
    caches, tokens = (BufferedCache(model), BufferedCache(model)), torch.tensor([[5], [7]])
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        for cache in (*caches, plain):
            model(prompt()["input_ids"], past_key_values=cache)
        for _ in range(3):
            model(tokens, past_key_values=caches[0])
        for _ in range(6):
            found = [model(tokens, past_key_values=cache).logits for cache in caches]
    assert recorder.captures == 1
    with torch.no_grad(), attnpatch.patched(attnpatch.unpatch(model)):
        for _ in range(9):
            expected = model(tokens, past_key_values=plain).logits
    torch.testing.assert_close(found[0], expected)


def test_lengths_that_change_with_every_step_are_not_captured(model_with, patched, recorder, run):
    expected = run(model_with(num_hidden_layers=1), None)
    model = patched()
    assert torch.equal(run(model, DynamicCache(config=model.config)), expected)
    assert recorder.captures == 0


def test_a_static_cache(model_with, patched, recorder, run):
    plain, model = model_with(num_hidden_layers=1), patched()
    expected = run(plain, StaticCache(config=plain.config, max_cache_len=64), max_new_tokens=10)
    found = run(model, StaticCache(config=model.config, max_cache_len=64), max_new_tokens=10)
    assert torch.equal(found, expected)
    assert recorder.replays > 0


def test_outputs_of_a_replay_are_the_callers(patched, recorder, prompt):
    """The next replay does not overwrite them."""
    model, cache = patched(), None
    with torch.no_grad():
        cache = BufferedCache(model)
        model(prompt()["input_ids"], past_key_values=cache)
        logits = [model(torch.tensor([[t], [t]]), past_key_values=cache).logits for t in (4, 5, 6, 7)]
    assert recorder.replays == 2
    assert not torch.equal(logits[2], logits[3])
    assert all(x.isfinite().all() for x in logits)


def test_gradients_are_not_captured(patched, recorder, prompt):
    model = patched()
    for _ in range(3):
        model(**prompt(), labels=prompt()["input_ids"]).loss.backward()
    assert recorder.captures == 0
    assert model.lm_head.weight.grad.isfinite().all()


def test_a_prefill_is_not_captured(patched, recorder, prompt):
    model = patched()
    with torch.no_grad():
        for _ in range(4):
            model(**prompt(), use_cache=False)
    assert recorder.captures == 0
    assert calls(model, captured=False) == {"prefill": 4}


def test_an_error_without_a_message_is_said_by_its_name(recorder, caplog):
    recorder.fails_with = ""
    assert called(doubling(Replays(recorder, "cpu")), 1, 2, 3) == [[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]]
    assert "a step is not replayed from a CUDA graph: RuntimeError" in caplog.text


def test_what_cannot_be_captured_runs_and_is_said_once(model_with, patched, recorder, run, caplog):
    expected = run(model_with(num_hidden_layers=1), None, max_new_tokens=10)
    model = patched()
    recorder.fails_with = "operation not permitted when stream is capturing\nand more"
    assert torch.equal(run(model, BufferedCache(model), max_new_tokens=10), expected)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "attnpatch"]
    assert line == "a step is not replayed from a CUDA graph: operation not permitted when stream is capturing"
    assert calls(model, captured=False) == {"prefill": 1, "decode": 9}


def test_unpatch_lets_go_of_captured_steps(patched, run):
    model = patched()
    run(model, BufferedCache(model), max_new_tokens=8)
    replays = model._compiled_call_impl.collector.replays
    steps = [step for step in replays._steps if step._captured]  # held here: a model's are let go with it
    assert len(steps) == 1
    attnpatch.unpatch(model)
    assert steps[0]._captured is None
    assert len(replays._steps) == 0


def doubling(replays, **options):
    """A decode step that doubles its one input."""
    return replays.step(lambda x: _decoded((x * 2,)), Inputs((), (0,), (), **options), [torch.ones(2)])


def called(step, *values, beside=()):
    """What a step gives for inputs of these values, one call each, and for what is ``beside`` them."""
    found = []
    for x in values:
        with torch.no_grad(), dispatch.recording():
            found.append(step(torch.full((2,), float(x)), *beside)[0].tolist())
    return found


def test_a_second_thread_runs_beside_a_replay_of_any_step(recorder):
    """It must overwrite neither the captured call's inputs nor, in the memory that steps share, its outputs."""
    replays = Replays(recorder, "cpu")
    steps, seen = (doubling(replays), doubling(replays)), []
    for step in steps:
        called(step, 1, 2)
    assert recorder.captures == 2

    def beside():
        recorder.before_replay = lambda: None
        for step in steps:
            thread = threading.Thread(target=lambda step=step: seen.extend(called(step, 4)))
            thread.start()
            thread.join(timeout=10)

    recorder.before_replay = beside
    assert called(steps[0], 3) == [[6.0, 6.0]]
    assert (seen, recorder.replays) == ([[8.0, 8.0]] * 2, 1)


class Stream:
    """A stream of a device that is not here."""

    def __init__(self):
        self.waits_for = []

    def wait_stream(self, other):
        self.waits_for.append(other)


def test_a_replay_on_another_stream_waits_for_the_one_before(monkeypatch, recorder):
    device, (first, second) = torch.device("cuda", 1), (Stream(), Stream())
    replays = Replays(recorder)
    for stream in (first, first, second, second, first):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda of, stream=stream: stream if of == device else None)
        replays.wait(device)
    assert (first.waits_for, second.waits_for) == ([second], [first])


def test_a_step_that_someone_else_captures_is_a_part_of_that(monkeypatch, recorder):
    step = doubling(replays := Replays(recorder, "cpu"))
    called(step, 1, 2, 3)
    assert (recorder.captures, recorder.replays) == (1, 1)
    replays.device_type = "cuda"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert called(step, 4, 5) == [[8.0, 8.0], [10.0, 10.0]]
    assert (recorder.captures, recorder.replays) == (1, 1)


def test_a_mode_sees_what_a_step_does(recorder):
    step = doubling(Replays(recorder, "cpu"))
    called(step, 1, 2)
    with FlopCounterMode(display=False):
        called(step, 3)
    assert recorder.replays == 0
    called(step, 3)
    assert recorder.replays == 1


def test_inputs_of_an_inference_mode_are_copied(recorder):
    """Their copies are none of it, and count a write from the start."""
    with torch.inference_mode():
        assert called(doubling(Replays(recorder, "cpu")), 1, 2, 3) == [[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]]
    assert (recorder.captures, recorder.replays) == (1, 1)


def test_casts_that_autocast_keeps_are_no_part_of_a_capture(recorder):
    """They are freed when its context ends, and the graph would go on reading where they were."""
    with torch.autocast("cpu", torch.bfloat16):
        called(doubling(Replays(recorder, "cpu")), 1, 2)
        assert torch.is_autocast_cache_enabled()
    assert recorder.keeps_casts == [False]


def test_what_a_graph_inside_of_the_graph_writes_is_not_lost(recorder, caplog):
    def count(x, steps):
        return checkpoint(lambda x: x + steps.add_(1), x, use_reentrant=False) * 1

    def backend(gm, example_inputs):
        inputs = Inputs.of(gm.graph, example_inputs)
        return Replays(recorder, "cpu").step(lambda *args: _decoded(gm(*args)), inputs, example_inputs)

    step, steps, found = torch.compile(count, backend=backend), torch.zeros(1), []
    for _ in range(5):
        with torch.no_grad(), dispatch.recording():
            found.append(step(torch.ones(1), steps).item())
    assert (found, steps.item()) == ([2.0, 3.0, 4.0, 5.0, 6.0], 5.0)
    assert (recorder.captures, recorder.replays) == (1, 0)
    assert "a copied input is written" in caplog.text


def pair(x):
    y = x + 1
    return y, y[:1]


def with_gradients(x):
    with torch.enable_grad():
        return (x * torch.ones(2, requires_grad=True),)


SHARE = "outputs share memory with each other or with an input"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (pair, SHARE),
        (lambda x: (x.view(-1),), SHARE),
        (with_gradients, "outputs record gradients"),
        (lambda x: (TwoTensor(x + 1, x + 2),), "an output wraps other tensors"),
    ],
    ids=["each other", "a copy", "gradients", "wrapper"],
)
def test_outputs_are_not_parted_from_what_they_belong_to(recorder, caplog, function, reason):
    step = Replays(recorder, "cpu").step(lambda x: _decoded(function(x)), Inputs((), (0,), ()), [torch.ones(2)])
    for n in range(4):
        with torch.no_grad(), dispatch.recording():
            x = torch.full((2,), float(n))
            found, expected = step(x)[0], function(x)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert found.requires_grad == expected.requires_grad
    assert (recorder.captures, recorder.replays) == (1, 0)
    assert reason in caplog.text


def _decoded(outputs):
    """``outputs``, as if an attention had run."""
    dispatch._current.recording.dispatches.append(dispatch.Dispatch("decode", "cpu.sdpa", ""))
    return outputs


def test_a_replay_counts_as_the_call_that_was_captured(recorder):
    """Not as the graph's last run, which may have been of another kind."""
    step = Replays(recorder, "cpu").step(lambda x: _decoded((x + 1,)), Inputs((), (0,), ()), [torch.ones(2)])
    record = GraphRecord([SiteRecord("layer", "rule", "", "here")])
    with torch.no_grad():
        for n in (2, 2, 3, 2):
            with dispatch.recording() as recorded:
                step(torch.ones(n))
            if n == 3:
                recorded.dispatches[:] = [dispatch.Dispatch("append", "cpu.tiled", "")]
            record.count(recorded)
    assert recorder.replays == 1
    counted = [(d.phase, captured, n) for ((d,), captured), n in record.runs.items()]
    assert counted == [("decode", False, 2), ("append", False, 1), ("decode", True, 1)]


def test_who_asks_for_replays_where_there_are_none_is_told_once(recorder, caplog):
    replays = Replays(recorder, "cuda")
    for _ in range(2):
        replays.step(torch.neg, Inputs((), (0,), ()), [torch.zeros(2)])
    said = [r.getMessage() for r in caplog.records if r.name == "attnpatch"]
    assert said == ["cuda_graphs=True: a graph on cpu is not replayed; one of tensors on one GPU is"]


def test_a_model_on_the_cpu_runs_as_ever(model_with, run):
    """Nothing of CUDA is asked, which may not be there."""
    expected = run(model_with(num_hidden_layers=1), None, max_new_tokens=4)
    model = attnpatch.patch(model_with(num_hidden_layers=1), cuda_graphs=True, cache="buffered")
    assert torch.equal(run(model, None, max_new_tokens=4), expected)


def test_graphs_that_use_the_host_are_left_alone(recorder):
    assert isinstance(doubling(Replays(recorder, "cpu"), devices=frozenset({"cpu"})), ReplayedStep)
    assert not isinstance(doubling(Replays(recorder, "cpu"), devices=frozenset({"cpu", "meta"})), ReplayedStep)


def test_wrappers_of_tensors_are_not_copied(recorder):
    wrapper = TwoTensor(torch.ones(2), torch.ones(2))
    assert Replays(recorder, "cpu").step(torch.neg, Inputs((), (0,), ()), [wrapper]) is torch.neg


def test_steps_of_a_model_that_is_gone_are_let_go(recorder):
    step = doubling(replays := Replays(recorder, "cpu"))
    called(step, 1, 2)
    del step
    assert len(replays._steps) == 0


def test_weights_that_wrap_tensors(recorder):
    """As a step of doubling(), whose weight is two tensors in one. New ones inside are captured anew."""
    weight = TwoTensor(torch.ones(2), torch.full((2,), 2.0))
    inputs = Inputs((), (0,), (), wrapped=((1, attrgetter("a", "b")),))

    def function(x, weight):
        return _decoded((x * weight.a + weight.b,))

    step = Replays(recorder, "cpu").step(function, inputs, [torch.ones(2), weight])
    assert [called(step, n, beside=[weight]) for n in (1, 2, 3)] == [[[3.0] * 2], [[4.0] * 2], [[5.0] * 2]]
    assert (recorder.captures, recorder.replays) == (1, 1)
    weight.b.fill_(5.0)
    assert called(step, 1, beside=[weight]) == [[6.0] * 2]
    weight.b = torch.full((2,), 7.0)
    assert called(step, 1, beside=[weight]) == [[8.0] * 2]
    assert (recorder.captures, recorder.replays) == (1, 2)


@pytest.mark.parametrize("device_types", [("meta",), ("cpu", "meta")], ids=str)
def test_graphs_of_other_devices_are_left_alone(recorder, device_types):
    function = torch.add
    inputs = [torch.zeros(2, device=device) for device in device_types]
    assert Replays(recorder, "cpu").step(function, Inputs((), (), ()), inputs) is function


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_bad_option(model_with, value):
    with pytest.raises(ValueError, match=f"cuda_graphs={value!r} is none of 'auto', True, False"):
        attnpatch.patch(model_with(), cuda_graphs=value)


def test_one_way_to_make_cuda_graphs():
    with pytest.raises(ValueError, match="cuda_graphs=True beside Inductor's"):
        from_compile("reduce-overhead", {"cuda_graphs": True})


@pytest.mark.parametrize("ended", [False, True], ids=["at its end", "before"])
def test_a_capture_that_fails_is_ended_and_its_pool_left(monkeypatch, recorder, ended):
    """With a stand-in for CUDA: it goes on allocating to the pool of a capture that fails at its end."""
    done, device = [], torch.device("cuda", 0)

    def end(index, pool):
        done.append((index, pool))
        if ended:
            raise RuntimeError("not currently recording to mempool_id")

    pools = (types.SimpleNamespace(id=(0, n)) for n in itertools.count(1))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "empty")
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext(done.append(graph)))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    replays = Replays(recorder, "cuda")
    assert replays._pool(device) == replays._pool(device) == (0, 1)
    recorder.fails_with = "operation failed"
    with pytest.raises(RuntimeError, match="operation failed"):
        replays.record(None, [], device)
    assert done == [(0, (0, 1)), "empty"]
    assert replays._pool(device) == (0, 2)
