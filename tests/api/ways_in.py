"""One attention, and every way in that takes options."""

import torch
from torch import nn

import attnpatch
from attnpatch.testing.inputs import random_call


class Attention(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.transpose(-1, -2) * 0.3).softmax(dim=-1) @ v


QKV = random_call(2, 2, 2, 5, 5, 8)[:3]


def patched(**options):
    return attnpatch.patch(Attention(), **options)


def compiled(**options):
    return torch.compile(Attention(), backend="attnpatch", options=options)


def rewritten(**options):
    return attnpatch.rewrite(torch.fx.symbolic_trace(Attention()), QKV, **options)[0]


WAYS_IN = [patched, compiled, rewritten]
