"""Softmaxes that are not that of one row over its keys, and sinks that are none; entered in ``REFUSED``."""

import torch
import torch.nn.functional as F

from .lookalikes import B, H, S, causal, refused, scaled


@refused("softmax")
def softmax_twice(q, k, v):
    return scaled(q, k).softmax(-1).softmax(-1) @ v


@refused("softmax is over dim -1")
def softmax_over_scores_of_all_rows(q, k, v):
    """One softmax over every pair of a head."""
    return scaled(q, k).view(B, H, S * S).softmax(-1).view(B, H, S, S) @ v


@refused("not over the keys")
def softmax_over_heads_and_keys(q, k, v):
    scores = scaled(q, k).transpose(1, 2).reshape(B, S, H * S)
    return scores.softmax(-1).view(B, S, H, S).transpose(1, 2) @ v


@refused("gumbel_softmax")
def gumbel_softmax(q, k, v):
    return F.gumbel_softmax(scaled(q, k), dim=-1, hard=True) @ v


@refused("takes a part of the")
def part_of_the_probabilities(q, k, v):
    """The keys cut off have taken part in the sum, and no sink is among them."""
    return scaled(q, k).softmax(-1)[..., : S // 2] @ v[:, :, : S // 2]


@refused("concatenated with others")
def sink_in_front(q, k, v):
    """The learned logit first, and the last key cut off instead of it."""
    scores = torch.cat([torch.zeros(B, H, S, 1), scaled(q, k)], dim=-1)
    return scores.softmax(-1)[..., :-1] @ v


@refused("not one logit per head")
def sink_that_depends_on_the_scores(q, k, v):
    scores = scaled(q, k)
    return torch.cat([scores, scores.mean(-1, keepdim=True)], dim=-1).softmax(-1)[..., :-1] @ v


@refused("takes a part of the")
def last_key_dropped(q, k, v):
    """The shape of a sink's softmax, and no sink was added."""
    return scaled(q, k).softmax(-1)[..., :-1] @ v[:, :, :-1]


@refused("softmax is over dim")
def rows_normalised_and_transposed(q, k, v):
    return (k @ q.transpose(-1, -2)).softmax(-1).transpose(-1, -2) @ v


@refused("softmax is over dim -2")
def exp_over_the_sum_of_rows(q, k, v):
    e = scaled(q, k).exp()
    return (e / e.sum(-2, keepdim=True)) @ v


@refused("exp is another function than softmax")
def exp_over_the_sum_of_others(q, k, v):
    """The numerator is causal, the denominator is not."""
    e = scaled(q, k).exp()
    return (e * causal() / e.sum(-1, keepdim=True)) @ v


@refused("add reads the attention probabilities")
def slots(q, k, v):
    """Slot attention: a softmax over the slots, then a mean over the tokens."""
    p = scaled(q, k).softmax(-2) + 1e-8
    return (p / p.sum(-1, keepdim=True)) @ v


@refused("scores are also read by transpose")
def co_attention(q, k, v):
    """Both directions of a cross attention from one map."""
    scores = scaled(q, k)
    return scores.softmax(-1) @ v, scores.transpose(-1, -2).softmax(-1) @ q


@refused("softmax")
def sum_without_its_dimension(q, k, v):
    """Sums of rows divide columns where both are equally many."""
    e = scaled(q, k).exp()
    return (e / e.sum(-1)[:, :, None, :]) @ v


@refused("softmax")
def softmax_with_a_learned_exponent(q, k, v):
    p = scaled(q, k).softmax(-1).pow(2)
    return (p / p.sum(-1, keepdim=True)) @ v
