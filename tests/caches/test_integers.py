"""A cache of somebody else's, in integers of 4 bits: a layer of transformers that packs, writes and multiplies out."""

import pytest
import torch
from transformers.cache_utils import Cache, StaticLayer

import attnpatch
from attnpatch.tbq4.codec import pack

GROUP = 8


class Int4Layer(StaticLayer):
    """Integers with a scale and a zero point per token, head and group of channels."""

    def lazy_initialization(self, key_states, value_states):
        super().lazy_initialization(key_states, value_states)
        self.stored = [[self.buffer(x) for x in integers(states)] for states in (key_states, value_states)]

    def buffer(self, x):
        return x.new_zeros(*x.shape[:2], self.max_cache_len, x.shape[3])

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        positions = torch.arange(key_states.shape[2]) + self.cumulative_length
        self.cumulative_length.add_(key_states.shape[2])
        for buffers, states in zip(self.stored, (key_states, value_states), strict=True):
            for buffer, x in zip(buffers, integers(states), strict=True):
                buffer.index_copy_(2, positions, x)
        return tuple(multiplied_out(*buffers) for buffers in self.stored)


def integers(states):
    groups = states.unflatten(-1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = (high - low).clamp(min=1e-6) / 15
    codes = ((groups - low[..., None]) / scale[..., None]).round().to(torch.uint8)
    return pack(codes.flatten(-2)), scale, -low / scale


def multiplied_out(codes, scale, zero):
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return ((nibbles.unflatten(-1, (-1, GROUP)) - zero[..., None]) * scale[..., None]).flatten(-2)


def cache(model):
    return Cache(layers=[Int4Layer(32) for _ in range(model.config.num_hidden_layers)])


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_generate(model_with, run, attn_implementation):
    """What is written in a forward is read in it, and never multiplied out."""
    model = model_with(attn_implementation=attn_implementation)
    expected = run(model, cache(model), pads=2)
    attnpatch.patch(model, strict=True, cache=None)
    assert torch.equal(run(model, cache(model), pads=2), expected)
    sites = attnpatch.report(model).sites
    assert len(sites) == 2
    assert all(site.mask.endswith("int4 K, int4 V") for site in sites), [site.mask for site in sites]
    assert {(d.phase, d.backend) for site in sites for d in site.dispatches} >= {("decode", "cpu.tiled")}
