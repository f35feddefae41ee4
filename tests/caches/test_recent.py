"""TBQ4Cache(recent=): what update() returns, against a direct account of which tokens are kept as they were."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch.caches import layers
from attnpatch.caches.tbq4 import TBQ4Cache
from attnpatch.recent import FIRST, rows_for, with_recent
from tests.caches.conftest import make_model
from tests.caches.simulated import ROUND, recent_cache

CONFIG = make_model(num_hidden_layers=1).config


class Account:
    """K or V of a sequence, token by token: what it was, while a ring has it, and what its codes stand for."""

    def __init__(self, recent, form, centred):
        self.recent, self.form, self.centred = recent, form, centred
        self.best = self.rounded = torch.zeros(2, 2, 0, 16)

    @property
    def length(self):
        return self.best.shape[2]

    def append(self, x):
        if self.length == 0:
            self.centre = x.mean(2, keepdim=True) if self.centred else 0.0
        first, new, begin = self.length == 0, x.shape[2], max(self.length - self.recent + 1, FIRST)
        past = self.best, self.rounded
        self.best = torch.cat([self.best, x], 2)
        self.rounded = torch.cat([self.rounded, ROUND[self.form](x - self.centre) + self.centre], 2)
        known = self.best.clone()
        gone = max(self.length - self.recent - 64, FIRST)
        self.best[:, :, FIRST:gone] = self.rounded[:, :, FIRST:gone]
        if first:
            return x
        if new > 64:  # reads the window before it takes its place
            return torch.cat([self._read(*past, begin), x], 2)
        return self._read(known, self.rounded, begin)

    def _read(self, best, rounded, begin):
        j = torch.arange(best.shape[2])
        return torch.where(((j < FIRST) | (j >= begin))[:, None], best, rounded)

    def change(self, change):
        self.best, self.rounded = change(self.best), change(self.rounded)


def same(cache, accounts, new):
    x = torch.randn(2, 2, 2, new, 16)
    for got, account, states in zip(cache.update(*x, 0), accounts, x, strict=True):
        torch.testing.assert_close(got, account.append(states), rtol=1e-4, atol=1e-5)


STEPS = st.one_of(
    st.tuples(st.just("append"), st.sampled_from([1, 1, 2, 7, 63, 64, 65, 150])),
    st.tuples(st.just("crop"), st.sampled_from([1, 3, 40, 64, 65, 100])),
    st.tuples(st.just("swap"), st.just(0)),
)
FORMATS = st.sampled_from([("tbq4", "tbq4"), ("int8", "tbq4"), ("dense", "tbq4"), ("tbq4", "dense")])


@settings(max_examples=60, deadline=None)
@given(
    recent=st.sampled_from([1, 3, 8, 100]),
    formats=FORMATS,
    centre=st.booleans(),
    first=st.sampled_from([1, 5, 90, 200]),
    steps=st.lists(STEPS, max_size=12),
)
def test_update(recent, formats, centre, first, steps):
    torch.manual_seed(0)
    centre = centre and formats[0] != "dense"
    cache = TBQ4Cache(CONFIG, keys=formats[0], values=formats[1], centre_keys=centre, recent=recent)
    accounts = Account(recent, formats[0], centre), Account(recent, formats[1], False)
    same(cache, accounts, first)
    for step, n in steps:
        if step == "append":
            same(cache, accounts, n)
        elif step == "crop":
            cache.crop(-n)
            for account in accounts:
                account.change(lambda x, n=n: x[:, :, : max(x.shape[2] - n, 0)])
        elif accounts[0].length:
            cache.reorder_cache(torch.tensor([1, 0]))
            for account in accounts:
                account.change(lambda x: x[[1, 0]])
            if centre:
                accounts[0].centre = accounts[0].centre[[1, 0]]
    same(cache, accounts, 1)


def test_a_window_is_what_it_says():
    """The last 3 and the first 4, their own included; the others are rounded."""
    torch.manual_seed(0)
    cache, x = TBQ4Cache(CONFIG, recent=3), torch.randn(2, 1, 2, 30, 16)
    cache.update(*x[:, :, :, :29], 0)
    for got, exact in zip(cache.update(*x[:, :, :, 29:], 0), x, strict=True):
        as_it_was = (got - exact).abs().amax((0, 1, 3)) < 1e-6
        assert as_it_was.nonzero().flatten().tolist() == [0, 1, 2, 3, 27, 28, 29]


def test_with_recent():
    """Position 80 of one new token, window 3: first tokens and window from the ring, and nothing behind the token."""
    stored, ring = torch.zeros(1, 1, 90, 1), torch.zeros(1, 1, rows_for(3), 1)
    for p in range(84):  # three more were stored, and taken back
        ring[:, :, p if p < FIRST else FIRST + (p - FIRST) % (3 + 64)] = p
    for new, expected in ((1, [1, 2, 3, 78, 79, 80]), (3, [1, 2, 3, 78, 79, 80, 81, 82]), (0, [1, 2, 3, 78, 79])):
        found = with_recent(stored, ring, torch.tensor(80), new).flatten()
        assert found.nonzero().flatten().tolist() == found[found > 0].tolist() == expected
    torch.library.opcheck(torch.ops.attnpatch.with_recent.default, (stored, ring, torch.tensor(80), 1))
    torch.library.opcheck(torch.ops.attnpatch.recent_keys.default, (ring, torch.tensor(80), 1))


def test_generate(model, run, mode):
    options = {**mode, "max_new_tokens": 20}
    expected = run(model, recent_cache(model, 5), **options)
    assert torch.equal(run(model, TBQ4Cache(model, recent=5), **options), expected)
    assert not torch.equal(run(model, TBQ4Cache(model), **options), expected) or mode, "a window that changes nothing"


def test_assisted_decoding(model_with, run):
    model, assistant = model_with(), model_with(num_hidden_layers=1, hidden_size=32)
    options = {"batch": 1, "assistant_model": assistant, "max_new_tokens": 16}
    assert torch.equal(run(model, TBQ4Cache(model, recent=5), **options), run(model, recent_cache(model, 5), **options))


CHANGES = {
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "ids": lambda cache: cache.batch_select_indices(torch.tensor([1, 1, 0])),
    "offload and prefetch": lambda cache: [f() for x in cache.layers for f in (x.offload, x.prefetch)],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_of_the_batch(model, prompt, change):
    caches = TBQ4Cache(model, recent=5, centre_keys=False), recent_cache(model, 5, centre_keys=False)
    after = []
    for cache in caches:
        with torch.no_grad():
            for n in (9, 1, 2):
                model(prompt(n)["input_ids"], past_key_values=cache)
            change(cache)
            batch = cache.layers[0].keys.shape[0]
            after.append(model(torch.full((batch, 1), 5), past_key_values=cache).logits)
    torch.testing.assert_close(*after)


def test_growth_reset_and_copies(model, prompt, monkeypatch):
    """Rings stay as large as they are; a copy has its own; a reset cache begins anew."""
    monkeypatch.setattr(layers, "FIRST_CAPACITY", 16)
    cache, expected = TBQ4Cache(model, recent=5), recent_cache(model, 5)
    with torch.no_grad():
        for n in (9, 3, 30, 1):
            got, want = (model(prompt(n)["input_ids"], past_key_values=x).logits for x in (cache, expected))
            torch.testing.assert_close(got, want)
        assert cache.layers[0].key_buffer.shape[2] > 16
        assert cache.layers[0].key_ring.shape == (2, 2, 4 + 5 + 64, 16)
        other = copy.deepcopy(cache)
        assert other.layers[0].key_ring.data_ptr() != cache.layers[0].key_ring.data_ptr()
        one = prompt(1)["input_ids"]
        torch.testing.assert_close(*(model(one, past_key_values=x).logits for x in (cache, other)))
        cache.reset()
        assert cache.num_bytes == 0
        again = recent_cache(model, 5)
        for n in (6, 2):
            got, want = (model(prompt(n)["input_ids"], past_key_values=x).logits for x in (cache, again))
            torch.testing.assert_close(got, want)


def test_a_forward_that_failed_takes_nothing(model, prompt):
    """It left 100 tokens in the ring; those it displaced are read as codes from then on, and nothing else changes."""
    cache = TBQ4Cache(model, recent=5)
    with torch.no_grad():
        model(prompt(30)["input_ids"], past_key_values=cache)
        before = [layer.keys.clone() for layer in cache.layers]
        cache.tokens.begin(100, torch.device("cpu"))
        for layer in cache.layers:
            layer.update(*torch.full((2, 2, 2, 100, 16), 7.0))
        cache.tokens.padded = False
        cache.crop(0)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert (layer.keys - keys).abs().max() < 1.0, "and not 7"
        assert (layer.keys[:, :, :4] - keys[:, :, :4]).abs().max() < 1e-6


def test_what_is_read_through_layers(model, prompt):
    cache, expected = TBQ4Cache(model, recent=5), recent_cache(model, 5)
    with torch.no_grad():
        for x in (cache, expected):
            model(prompt(20)["input_ids"], past_key_values=x)
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        kept = [0, 1, 2, 3, 16, 17, 18, 19]
        torch.testing.assert_close(layer.keys[:, :, kept], other.exact.keys[:, :, kept])
        torch.testing.assert_close(layer.values[:, :, 4:16], other.values[:, :, 4:16])


def test_dense_layers_have_no_ring(model, prompt):
    cache = TBQ4Cache(model, recent=5, skip_layers=("first",))
    with torch.no_grad():
        model(prompt()["input_ids"], past_key_values=cache)
    assert cache.layers[0].key_ring is None
    assert cache.layers[1].key_ring is not None
    assert cache.num_bytes - TBQ4Cache.num_bytes.fget(_without(model, prompt)) == 2 * 2 * 2 * (4 + 5 + 64) * 16 * 4


def _without(model, prompt):
    cache = TBQ4Cache(model, skip_layers=("first",))
    with torch.no_grad():
        model(prompt()["input_ids"], past_key_values=cache)
    return cache


def test_arguments(model):
    for recent in (-1, 2.5, True, "64"):
        with pytest.raises(ValueError, match=f"recent={recent!r} is no number of tokens; 64 keeps the last 64"):
            TBQ4Cache(model, recent=recent)
    with pytest.raises(ValueError, match='recent=8 keeps tokens beside their codes, and keys="dense", values="dense"'):
        TBQ4Cache(model, keys="dense", values="dense", recent=8)
