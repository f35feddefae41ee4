"""Attention in disguise, and next to it what differs by a detail: rewritten or not, the numbers are the same."""

import torch
import torch.nn.functional as F

from .lookalikes import B, D, H, S, causal, scaled

EITHER_WAY = []
"""Functions of q, k and v that return one tensor."""


def either_way(function):
    """Enter a function in ``EITHER_WAY``."""
    EITHER_WAY.append(function)
    return function


@either_way
def scores_transposed(q, k, v):
    """Of equal lengths, so that every shape fits."""
    return scaled(q, k).transpose(-1, -2).softmax(-1) @ v


@either_way
def scores_transposed_by_einsum(q, k, v):
    """Rows and keys change places: attention of k over q, weighted sum of v."""
    return torch.einsum("bhid,bhjd->bhji", q, k).softmax(-1) @ v


@either_way
def temperature_per_key(q, k, v):
    t = torch.linspace(0.5, 1.5, S)
    return (scaled(q, k) / t).softmax(-1) @ v


@either_way
def gate_on_scores(q, k, v):
    """Forgetting: a gate from the values multiplies."""
    return (scaled(q, k) * torch.sigmoid(v.mean(-1)).unsqueeze(-2)).softmax(-1) @ v


@either_way
def difference_of_two_maps(q, k, v):
    q1, q2, k1, k2 = *q.chunk(2, -1), *k.chunk(2, -1)
    return ((q1 @ k1.mT).softmax(-1) - 0.3 * (q2 @ k2.mT).softmax(-1)) @ v


@either_way
def noisy_scores(q, k, v):
    scores = scaled(q, k)
    return (scores + torch.randn_like(scores)).softmax(-1) @ v


@either_way
def softmin(q, k, v):
    return F.softmin(scaled(q, k), dim=-1) @ v


@either_way
def masked_sum_without_max(q, k, v):
    """Exp / (epsilon + sum): no softmax and no sink of logit zero."""
    e = scaled(q, k).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-3)) @ v


@either_way
def exp_of_base_two(q, k, v):
    e = torch.exp2(scaled(q, k))
    return (e / e.sum(-1, keepdim=True)) @ v


@either_way
def keys_as_rows(q, k, v):
    return (k @ q.transpose(-1, -2)).softmax(-2).transpose(-1, -2) @ v


@either_way
def keys_of_an_image(q, k, v):
    k = k.view(B, H, 2, S // 2, D)
    return torch.einsum("bhid,bhxyd->bhixy", q, k).flatten(-2).softmax(-1) @ v


@either_way
def last_key_dropped_before_softmax(q, k, v):
    return scaled(q, k)[..., :-1].softmax(-1) @ v[:, :, :-1]


@either_way
def values_of_one_sequence(q, k, v):
    return scaled(q, k).softmax(-1) @ v[0]


@either_way
def keys_of_one_sequence(q, k, v):
    return scaled(q, k[0]).softmax(-1) @ v


@either_way
def one_query_head(q, k, v):
    return scaled(q[:, :1], k).softmax(-1) @ v


@either_way
def interleaved_keys_and_tiled_values(q, k, v):
    return scaled(q, k[:, :2].repeat_interleave(2, 1)).softmax(-1) @ v[:, :2].repeat(1, 2, 1, 1)


@either_way
def batch_and_heads_swapped(q, k, v):
    """As many heads as sequences: every shape fits."""
    q, k, v = (x[:, :B] for x in (q, k, v))
    return scaled(q, k).softmax(-1).transpose(0, 1) @ v


@either_way
def mask_repeated_in_another_order(q, k, v):
    """Heads within sequences, and a mask with sequences within heads."""
    q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
    keep = (torch.arange(S) < torch.tensor([[S], [3]])).repeat(H, 1)
    return scaled(q, k).masked_fill(~keep[:, None], -torch.inf).softmax(-1) @ v


@either_way
def batch_viewed_as_heads(q, k, v):
    q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
    bias = torch.arange(H * 1.0).view(H, 1, 1, 1) * torch.linspace(0, 1, S)
    scores = (scaled(q, k).view(H, B, S, S) + bias).view(B * H, S, S)
    return scores.softmax(-1) @ v


@either_way
def sum_of_two_products(q, k, v):
    return (q @ v.transpose(-1, -2) * 0.1 + scaled(q, k)).softmax(-1) @ v


@either_way
def negative_scale_per_head(q, k, v):
    scores = scaled(q, k) * torch.linspace(-1, 1, H).view(H, 1, 1)
    return scores.masked_fill(~causal(), -torch.inf).softmax(-1) @ v


@either_way
def sinks_after_the_shift(q, k, v):
    """The scores are shifted, the sink is not."""
    scores = scaled(q, k)
    scores = scores - scores.amax(-1, keepdim=True)
    return torch.cat([scores, torch.ones(B, H, S, 1)], -1).softmax(-1)[..., :-1] @ v


@either_way
def shift_after_the_sinks(q, k, v):
    scores = torch.cat([scaled(q, k), torch.ones(B, H, S, 1)], -1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return scores.softmax(-1)[..., :-1] @ v


@either_way
def sinks_of_each_row(q, k, v):
    return torch.cat([scaled(q, k), q[..., :1]], -1).softmax(-1)[..., :-1] @ v


@either_way
def sinks_and_softcap(q, k, v):
    scores = torch.tanh(scaled(q, k) / 2) * 2
    return torch.cat([scores, torch.ones(B, H, S, 1)], -1).softmax(-1)[..., :-1] @ v


@either_way
def sinks_scaled_with_the_scores(q, k, v):
    scores = torch.cat([q @ k.transpose(-1, -2), torch.ones(B, H, S, 1)], -1)
    return (scores * 0.25).softmax(-1)[..., :-1] @ v


@either_way
def sink_with_a_value(q, k, v):
    scores = torch.cat([scaled(q, k), torch.ones(B, H, S, 1)], -1)
    return scores.softmax(-1) @ torch.cat([v, torch.ones(B, H, 1, D)], -2)


@either_way
def two_sinks(q, k, v):
    scores = torch.cat([scaled(q, k), torch.ones(B, H, S, 1), torch.zeros(B, H, S, 1)], -1)
    return scores.softmax(-1)[..., :-2] @ v


@either_way
def shift_before_softcap(q, k, v):
    scores = scaled(q, k)
    return torch.tanh(scores - scores.amax(-1, keepdim=True)).softmax(-1) @ v


@either_way
def shift_by_the_mean_of_the_query(q, k, v):
    return (scaled(q, k) - q.mean(-1, keepdim=True)).softmax(-1) @ v


@either_way
def maximum_read_again(q, k, v):
    scores = scaled(q, k)
    top = scores.amax(-1, keepdim=True)
    return (scores - top).softmax(-1) @ v + top


@either_way
def logsumexp_of_other_scores(q, k, v):
    scores = scaled(q, k)
    o = scores.masked_fill(~causal(), -torch.inf).softmax(-1) @ v
    return o + scores.logsumexp(-1, keepdim=True)


@either_way
def logsumexp_of_masked_scores(q, k, v):
    scores = scaled(q, k).masked_fill(~causal(), -torch.inf)
    return scores.softmax(-1) @ v + scores.logsumexp(-1, keepdim=True)


@either_way
def logsumexp_over_the_rows(q, k, v):
    scores = scaled(q, k)
    return scores.softmax(-1) @ v + scores.logsumexp(-2).unsqueeze(-1)


@either_way
def numerator_changed_in_place(q, k, v):
    e = scaled(q, k).exp()
    total = e.sum(-1, keepdim=True)
    e.mul_(causal())
    return (e / total) @ v


@either_way
def numerator_changed_before_the_sum(q, k, v):
    e = scaled(q, k).exp()
    e.mul_(causal())
    return (e / e.sum(-1, keepdim=True)) @ v


@either_way
def scores_changed_after_softmax(q, k, v):
    scores = scaled(q, k)
    p = scores.softmax(-1)
    scores.mul_(2.0)
    return p @ v


@either_way
def scores_of_one_head_changed_in_place(q, k, v):
    scores = scaled(q, k)
    scores[:, 0].mul_(2.0)
    return scores.softmax(-1) @ v


@either_way
def diagonal_filled_in_place(q, k, v):
    scores = scaled(q, k)
    scores.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)
    return scores.softmax(-1) @ v


@either_way
def scores_filled_through_a_view(q, k, v):
    scores = scaled(q, k)
    scores.view(B * H, S, S).masked_fill_(~causal(), -torch.inf)
    return scores.softmax(-1) @ v


@either_way
def scores_scaled_into_themselves(q, k, v):
    scores = scaled(q, k)
    torch.mul(scores, 0.5, out=scores)
    return scores.softmax(-1) @ v


@either_way
def scores_changed_between_two_readers(q, k, v):
    scores = scaled(q, k)
    p = scores.softmax(-1)
    scores.mul_(0.5)
    return p @ v + scores.softmax(-1) @ v


@either_way
def probabilities_changed_in_place(q, k, v):
    p = scaled(q, k).softmax(-1)
    p.mul_(0.5)
    return p @ v


@either_way
def probabilities_filled_in_place(q, k, v):
    p = scaled(q, k).softmax(-1)
    p.masked_fill_(~causal(), 0.0)
    return p @ v


@either_way
def nan_replaced_by_where(q, k, v):
    scores = scaled(q, k).masked_fill(torch.arange(S) > torch.arange(S)[:, None] - 1, -torch.inf)
    p = scores.softmax(-1)
    return torch.where(torch.isnan(p), 0.0, p) @ v


@either_way
def output_viewed_flat(q, k, v):
    return (scaled(q, k).softmax(-1) @ v).view(B, H * S * D)


@either_way
def output_viewed_by_einsum(q, k, v):
    return torch.einsum("bhij,bhjd->bihd", scaled(q, k).softmax(-1), v).reshape(B, S, H * D)
