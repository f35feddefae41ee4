"""No attention by any reading."""

import math

import torch
import torch.nn.functional as F

from .lookalikes import D, S, causal, scaled


def sigmoid_attention(q, k, v):
    return torch.sigmoid(scaled(q, k) - math.log(S)) @ v


def relu_attention(q, k, v):
    return (torch.relu(scaled(q, k)) / S) @ v


def squared_relu_attention(q, k, v):
    return (F.relu(scaled(q, k)).square() / S) @ v


def scores_over_their_sum(q, k, v):
    scores = scaled(q, k).abs()
    return (scores / scores.sum(-1, keepdim=True)) @ v


def linear_attention(q, k, v):
    """Efficient attention: softmax of q and of k apart, the product of k and v first."""
    return q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)


def linear_attention_by_einsum(q, k, v):
    context = torch.einsum("bhnd,bhne->bhde", k.softmax(-2), v)
    return torch.einsum("bhde,bhnd->bhne", context, q.softmax(-1) * D**-0.5)


def elu_attention(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(-2, keepdim=True).transpose(-1, -2))


def retention(q, k, v):
    decay = 0.9 ** (torch.arange(S)[:, None] - torch.arange(S)).clamp(min=0)
    return (scaled(q, k) * decay * causal()) @ v


def additive_attention(q, k, v):
    """Bahdanau: no product of rows and keys."""
    scores = torch.tanh(q.unsqueeze(3) + k.unsqueeze(2)).sum(-1)
    return scores.softmax(-1) @ v


def graph_attention(q, k, v):
    """GAT: a sum of two logits under a leaky relu."""
    scores = F.leaky_relu(q[..., :1] + k[..., :1].transpose(-1, -2), 0.2)
    return scores.masked_fill(~causal(), -torch.inf).softmax(-1) @ v


def learned_mixing(q, k, v):
    """Random synthesizer: the scores are a table."""
    return (torch.arange(float(S * S)).view(S, S) / 50).softmax(-1) @ v


def distances(q, k, v):
    """Softmax of negative distances (prototype networks)."""
    return (-torch.cdist(q, k)).softmax(-1) @ v


def classifier(q, k, v):
    """Class probabilities weigh class embeddings."""
    weight = torch.linspace(-1, 1, D * 3).view(D, 3)
    return (q @ weight).softmax(-1) @ weight.t()


def codebook(q, k, v):
    """Soft vector quantisation: one table for all sequences."""
    table = torch.linspace(-1, 1, 6 * D).view(6, D).sin()
    return F.linear(q, table).softmax(-1) @ table


def attention_statistics_pooling(q, k, v):
    """A softmax over the tokens, per channel."""
    w = torch.tanh(q @ torch.eye(D)).softmax(-2)
    mean = (w * v).sum(-2, keepdim=True)
    return (mean.transpose(-1, -2) @ mean).flatten(2)


def gated_experts(q, k, v):
    gates = (q @ torch.linspace(-1, 1, 3 * D).view(D, 3)).softmax(-1)
    experts = torch.stack([k, v, k + v], dim=-2)
    return (gates.unsqueeze(-2) @ experts).squeeze(-2)


NO_SITE = [
    sigmoid_attention,
    relu_attention,
    squared_relu_attention,
    scores_over_their_sum,
    linear_attention,
    linear_attention_by_einsum,
    elu_attention,
    retention,
    additive_attention,
    graph_attention,
    learned_mixing,
    distances,
    classifier,
    codebook,
    attention_statistics_pooling,
    gated_experts,
]
"""Nothing to report."""
