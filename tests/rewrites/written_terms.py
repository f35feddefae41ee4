"""Attention whose terms are written in place after they were read: the numbers are those of the moment."""

import torch

from .lookalikes import B, H, S, causal, scaled

WRITTEN = []
"""Functions of q, k and v that return one tensor."""


def written(function):
    """Enter a function in ``WRITTEN``."""
    WRITTEN.append(function)
    return function


@written
def sinks(q, k, v):
    logits = k[0, :, 0, 0].clone()
    scores = torch.cat([scaled(q, k), logits.view(1, H, 1, 1).expand(B, -1, S, -1)], -1)
    logits.add_(3.0)
    return scores.softmax(-1)[..., :-1] @ v


@written
def sinks_of_ones(q, k, v):
    logits = torch.ones(H)
    scores = torch.cat([scaled(q, k), logits.view(1, H, 1, 1).expand(B, -1, S, -1)], -1)
    logits.zero_()
    return scores.softmax(-1)[..., :-1] @ v


@written
def slopes(q, k, v):
    slope = torch.rand(H)
    distance = torch.arange(S) - torch.arange(S)[:, None]
    scores = scaled(q, k) + slope[:, None, None] * distance
    slope.mul_(-2.0)
    return scores.masked_fill(~causal(), -torch.inf).softmax(-1) @ v


@written
def lengths(q, k, v):
    n = torch.tensor([4, S])
    scores = scaled(q, k).masked_fill(torch.arange(S) >= n[:, None, None, None], -torch.inf)
    n.fill_(1)
    return scores.softmax(-1) @ v


@written
def lengths_before_the_mask_is_applied(q, k, v):
    n = torch.tensor([4, S])
    hidden = torch.arange(S) >= n[:, None, None, None]
    n.fill_(1)
    return scaled(q, k).masked_fill(hidden, -torch.inf).softmax(-1) @ v


@written
def documents(q, k, v):
    starts = torch.tensor([0, 0, 0, 1, 0, 1, 1, 0, 0, 0])
    ids = starts.cumsum(0)
    scores = torch.where(ids[:, None] == ids, scaled(q, k), -torch.inf)
    starts.fill_(1)
    ids.zero_()
    return scores.softmax(-1) @ v


@written
def prefix(q, k, v):
    n = torch.tensor(3)
    keys, rows = torch.arange(S), torch.arange(S)[:, None]
    scores = torch.where((keys <= rows) | (keys < n), scaled(q, k), -torch.inf)
    n.add_(5)
    return scores.softmax(-1) @ v


@written
def padding(q, k, v):
    keep = k[:, 0, :, 0] > -0.5
    keep[:, 0] = True
    scores = scaled(q, k).masked_fill(~keep[:, None, None], -torch.inf)
    keep.logical_not_()
    return scores.softmax(-1) @ v


@written
def bias(q, k, v):
    b = k[0, 0] @ k[0, 0].t()
    scores = scaled(q, k) + b
    b.zero_()
    return scores.softmax(-1) @ v


@written
def bias_of_baddbmm(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    b = k @ k.transpose(-1, -2)
    scores = torch.baddbmm(b, q, k.transpose(-1, -2), alpha=0.25)
    b.zero_()
    return scores.softmax(-1) @ v


@written
def scale_of_each_row(q, k, v):
    t = q.norm(dim=-1, keepdim=True)
    scores = scaled(q, k) * t
    t.zero_()
    return scores.softmax(-1) @ v


@written
def scale_of_each_head(q, k, v):
    t = k[0, :, :1, :1].clone()
    scores = scaled(q, k) * t
    t.neg_()
    return scores.softmax(-1) @ v


@written
def repeated_keys(q, k, v):
    wide, v = (x[:, :2].repeat_interleave(2, dim=1) for x in (k, v))
    k.zero_()
    return scaled(q, wide).softmax(-1) @ v


@written
def expanded_keys(q, k, v):
    """An expanded view sees what is written."""
    wide = k[:, :1].expand(-1, H, -1, -1)
    k.mul_(2.0)
    return scaled(q, wide).softmax(-1) @ v


@written
def values_after_softmax(q, k, v):
    p = scaled(q, k).softmax(-1)
    v.mul_(2.0)
    return p @ v


@written
def query_through_einsum(q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q, k)
    q.zero_()
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


@written
def keys_before_the_logsumexp(q, k, v):
    scores = scaled(q, k)
    o = scores.softmax(-1) @ v
    k.zero_()
    return o + scores.logsumexp(-1, keepdim=True)


@written
def output_then_logsumexp(q, k, v):
    scores = scaled(q, k)
    o = scores.softmax(-1) @ v
    o.mul_(2.0)
    lse = scores.logsumexp(-1, keepdim=True)
    lse.add_(1.0)
    return o + lse
