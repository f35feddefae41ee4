"""generate() asks one token late whether it has ended, on caches of ours, and nobody can tell from what it returns."""

import pytest
import torch
from transformers import StoppingCriteriaList, TextStreamer
from transformers.cache_utils import DynamicCache
from transformers.generation import utils

import attnpatch
from attnpatch.caches.buffered import BufferedCache
from attnpatch.caches.stops import Deferred
from attnpatch.caches.tbq4 import TBQ4Cache

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Event:
    """Of a device on which all is done at once; torch has none for a CPU."""

    def __init__(self, **_):
        pass

    def record(self):
        pass

    synchronize = record


@pytest.fixture
def deferred(monkeypatch):
    """The CPU counts as a device where stops are deferred, from the next patch on."""
    monkeypatch.setattr(utils, "DeferredStopCheck", Deferred.__base__)  # as before the first patch
    monkeypatch.setattr(Deferred, "device_type", "cpu")
    monkeypatch.setattr(torch, "Event", Event)


@pytest.fixture
def model(model_with):
    return model_with(num_hidden_layers=1)


class Forwards:
    """Counts the forwards of a model."""

    def __init__(self, model):
        self.count = 0
        self.handle = model.register_forward_hook(self)

    def __call__(self, *_):
        self.count += 1


class Streamed(TextStreamer):
    """What a streamer is given."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def stops_after(tokens):
    """A criterion that every sequence meets at this length."""
    return StoppingCriteriaList([lambda ids, _: torch.full((len(ids),), ids.shape[1] >= tokens)])


def counted(model, run, cache, **options):
    forwards = Forwards(model)
    found = run(model, cache, return_dict_in_generate=True, **options)
    forwards.handle.remove()
    return found, forwards.count


ENDS = {"the length": ({}, 0), "a criterion": ({"stopping_criteria": stops_after(12)}, 1)}


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", [BufferedCache, TBQ4Cache])
@pytest.mark.parametrize(("end", "more"), ENDS.values(), ids=ENDS)
def test_what_generate_returns(model, run, end, more, kind, sampled):
    """Tokens, scores and the cache's length; a forward too many only where nobody could know before."""
    options = {**end, "output_scores": True, "do_sample": sampled}
    expected, forwards = counted(model, run, kind(model), **options)
    with attnpatch.patched(model, cache="buffered"):
        assert utils.DeferredStopCheck is Deferred
    found, late = counted(model, run, kind(model), **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.scores, expected.scores)
    assert late == forwards + more
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


@pytest.mark.usefixtures("deferred")
def test_a_chat_goes_on(model, run):
    """The cache then holds what was said, and no more."""
    options = {"stopping_criteria": stops_after(12), "batch": 1}
    with attnpatch.patched(model, strict=True, cache="buffered"):
        cache, plain = BufferedCache(model), DynamicCache(config=model.config)
        said, expected = (run(model, x, **options) for x in (cache, plain))
        more = torch.cat((said, said[:, :3]), dim=1)
        again = [model.generate(more, past_key_values=x, max_new_tokens=5, do_sample=False) for x in (cache, plain)]
    assert torch.equal(said, expected)
    assert torch.equal(*again)


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("end", [end for end, _ in ENDS.values()], ids=ENDS)
def test_what_is_streamed(model, run, end):
    attnpatch.patch(model, cache="buffered")
    streamer = Streamed()
    found = run(model, None, batch=1, streamer=streamer, **end)
    assert streamer.tokens == found[0].tolist()
    assert streamer.ended


@pytest.mark.usefixtures("deferred")
def test_sequences_that_end_apart(model_with, run):
    model = model_with(num_hidden_layers=1)
    first = run(model, None, max_new_tokens=3)[:, -1]
    options = {"eos_token_id": first.tolist(), "max_new_tokens": 9}
    expected = run(model, None, **options)
    with attnpatch.patched(model, cache="buffered", strict=True):
        assert torch.equal(run(model, None, **options), expected)


def test_where_it_holds(model, model_with):
    """On a GPU, and where the cache can forget its last token or nobody gets it; assistants are left alone."""
    cache, sliding = BufferedCache(model), BufferedCache(model_with("Gemma2", layer_types=KINDS))
    assert Deferred.is_supported(CUDA, cache, True, False)
    assert Deferred.is_supported(CUDA, sliding, False, False)
    assert not Deferred.is_supported(CUDA, sliding, True, False)
    assert not Deferred.is_supported(CUDA, cache, False, True)
    assert not Deferred.is_supported(CPU, cache, False, False)
    assert not Deferred.is_supported(CUDA, DynamicCache(), False, False)
    assert Deferred.is_supported(torch.device("mps"), DynamicCache(), False, False)  # transformers' own rule


KINDS = ["sliding_attention", "full_attention"]
