"""What a TBQ4Cache must equal: a dense cache that stores what the codec makes of keys and values."""

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from attnpatch import tbq4


def rounded(states):
    return tbq4.decode(*tbq4.encode(states), states.shape[3], states.dtype)


def rounded_to_int8(states):
    scale = states.float().abs().amax(-1, keepdim=True) / 127
    return ((states.float() / scale).round() * scale).to(states.dtype)


ROUND = {"tbq4": rounded, "int8": rounded_to_int8, "dense": lambda states: states}


class SimulatedLayer(DynamicLayer):
    def __init__(self, keys="tbq4", values="tbq4", centre_keys=None):
        super().__init__()
        self.formats, self.centre = (keys, values), 0.0
        self.centred = keys != "dense" if centre_keys is None else centre_keys

    def update(self, key_states, value_states, *args, **kwargs):
        past = (self.keys, self.values) if self.get_seq_length() else None
        if self.centred and past is None:
            self.centre = key_states.mean(2, keepdim=True)
        keys = ROUND[self.formats[0]](key_states - self.centre) + self.centre
        stored = super().update(keys, ROUND[self.formats[1]](value_states))
        if past is not None and key_states.shape[2] <= 64:
            return stored
        present = key_states, value_states
        return present if past is None else tuple(torch.cat(both, 2) for both in zip(past, present, strict=True))


def simulated_cache(model, dense=(), **choice):
    """Layers of full attention in the given formats, but for the ``dense`` ones; others as transformers makes them."""
    layers = DynamicCache(config=model.config).layers
    for i, layer in enumerate(layers):
        if type(layer) is DynamicLayer and i not in dense:
            layers[i] = SimulatedLayer(**choice)
    return Cache(layers=layers)


class RecentLayer(SimulatedLayer):
    """One that also has the first 4 tokens and the last ``recent`` as they were."""

    def __init__(self, recent, **choice):
        super().__init__(**choice)
        self.recent, self.exact = recent, DynamicLayer()

    def update(self, key_states, value_states, *args, **kwargs):
        past = self.get_seq_length()
        both = super().update(key_states, value_states), self.exact.update(key_states, value_states)
        keys = torch.arange(past + key_states.shape[2])
        kept = (keys < 4) | (keys > past - self.recent)
        return tuple(torch.where(kept[:, None], exact, stored) for stored, exact in zip(*both, strict=True))


def _of_both(name):
    def change(self, *args):
        getattr(SimulatedLayer, name)(self, *args)
        getattr(self.exact, name)(*args)

    return change


for _name in ("crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"):
    setattr(RecentLayer, _name, _of_both(_name))


def recent_cache(model, recent, **choice):
    """Like :func:`simulated_cache`, for ``TBQ4Cache(recent=)``."""
    cache = simulated_cache(model, **choice)
    cache.layers = [RecentLayer(recent, **choice) if type(x) is SimulatedLayer else x for x in cache.layers]
    return cache
