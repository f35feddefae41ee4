"""The buffers of a cache that is gone serve the next: its steps are replayed from the first on."""

import copy
import gc

import pytest
import torch

import attnpatch
from attnpatch.caches import spare
from attnpatch.replaying import Replays
from tests.caches.conftest import make_model, make_prompt
from tests.caches.recorder import Recorder


@pytest.fixture
def kept(monkeypatch):
    """The CPU counts as a device with memory for spare buffers; returns a setter of how much."""

    def memory(size):
        monkeypatch.setattr(spare, "memory", lambda device: size)

    memory(1 << 30)
    return memory


class Chats:
    """A replayed model, patched with a cache, and one that is neither."""

    def __init__(self, cache="buffered", **config):
        self.plain, self.recorder = make_model(num_hidden_layers=1, **config), Recorder()
        self.model = attnpatch.patch(copy.deepcopy(self.plain), strict=True, cache=cache, cuda_graphs=True)
        self.model._compiled_call_impl.collector.replays = Replays(self.recorder, "cpu")

    def say(self, length=9, batch=2, new=10, **options):
        """What ``generate()`` returns, which is right; and how many steps were captured and replayed in it."""
        before = self.recorder.captures, self.recorder.replays
        options = {**make_prompt(length, batch), "max_new_tokens": new, "do_sample": False, **options}
        found = self.model.generate(**options)
        gc.collect()  # a call that compiled leaves its arguments in cycles of torch.compile's
        tokens, expected = (getattr(x, "sequences", x) for x in (found, self.plain.generate(**options)))
        assert self.model._compiled_call_impl.options.cache == "tbq4" or torch.equal(tokens, expected)
        return found, (self.recorder.captures - before[0], self.recorder.replays - before[1])

    def steps(self, **options):
        return self.say(**options)[1]


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("cache", ["buffered", "tbq4"])
def test_the_second_call_is_replayed_from_its_first_step_on(cache):
    chats = Chats(cache)
    assert [chats.steps() for _ in range(3)] == [(1, 7), (0, 9), (0, 9)]
    assert chats.steps(length=40) == (0, 9), "another prompt that fits"


@pytest.mark.usefixtures("kept")
def test_4_bits_read_nothing_of_the_call_before():
    chats, fresh = Chats("tbq4"), Chats("tbq4")
    chats.say(length=60)
    assert torch.equal(chats.say()[0], fresh.say()[0])


@pytest.mark.usefixtures("kept")
def test_another_batch_and_more_room_are_captured_anew():
    chats = Chats()
    chats.say()
    assert chats.steps(batch=1) == (1, 7)
    assert chats.steps(batch=1, length=300) == (1, 7)
    assert chats.steps(batch=1, length=290) == (0, 9)


@pytest.mark.usefixtures("kept")
def test_what_someone_holds_stays_theirs():
    """The cache, a layer of it, or a view of what is in it."""
    chats = Chats()
    holds = [lambda x: x, lambda x: x.layers[0], lambda x: x.layers[0].keys, lambda x: x.layers[0].values[0, 0]]
    for hold in holds:
        found, _ = chats.say(return_dict_in_generate=True)
        held = hold(found.past_key_values)
        del found
        keys = getattr(getattr(held, "layers", [held])[0], "keys", held)
        before = keys.clone()
        assert chats.steps(length=12) == (1, 7)
        keys = getattr(getattr(held, "layers", [held])[0], "keys", held)
        assert torch.equal(keys, before)


@pytest.mark.usefixtures("kept")
def test_unpatch_lets_go():
    chats = Chats()
    chats.say()
    choice = chats.model._compiled_call_impl.choose_cache
    (layer,) = choice.spare._layers
    attnpatch.unpatch(chats.model)
    assert choice.spare._layers == []
    assert layer.key_buffer is not None, "of whoever has the layer"


def test_what_takes_too_much_memory_is_let_go(kept):
    chats = Chats()
    kept(1 << 10)
    chats.say()
    assert chats.model._compiled_call_impl.choose_cache.spare._layers == []
    assert chats.steps() == (1, 7)


def test_on_a_cpu_nothing_is_kept():
    chats = Chats()
    chats.say()
    assert chats.model._compiled_call_impl.choose_cache.spare._layers == []


@pytest.mark.usefixtures("kept")
def test_no_numbers_of_the_call_before_are_left():
    """Whoever reads past the end finds zeros, as in new buffers."""
    chats = Chats()
    chats.say(length=40)
    found, _ = chats.say(return_dict_in_generate=True)
    (layer,) = found.past_key_values.layers
    assert layer.key_buffer[:, :, 9 + 9 :].count_nonzero() == 0
    assert layer.key_buffer[:, :, : 9 + 9].count_nonzero() > 0


@pytest.mark.usefixtures("kept")
def test_an_empty_cache_has_no_batch():
    chats = Chats()
    chats.say(batch=3)
    with torch.no_grad():
        cache = chats.model(**make_prompt(batch=3)).past_key_values
        cache.crop(-9)
        assert cache.get_seq_length() == 0
        chats.model(**make_prompt(batch=2), past_key_values=cache)
    assert cache.batch_size == 2
