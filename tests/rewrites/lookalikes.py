"""What resembles attention and must not become it: changed scores, changed probabilities, further readers."""

import torch
import torch.nn.functional as F

B, H, S, D = 2, 4, 10, 8
MIX = torch.randn(H, H, generator=torch.Generator().manual_seed(2))

REFUSED = {}
"""Functions of q, k and v, with the words of their refusal."""


def refused(reason):
    """Enter a function in ``REFUSED``."""

    def enter(function):
        REFUSED[function] = reason
        return function

    return enter


def scaled(q, k):
    return q @ k.transpose(-1, -2) * D**-0.5


def causal():
    return torch.ones(S, S, dtype=torch.bool).tril()


@refused("sums over another dimension")
def talking_heads_after_softmax(q, k, v):
    return torch.einsum("bhij,hg->bgij", scaled(q, k).softmax(-1), MIX) @ v


@refused("conv2d")
def talking_heads_by_convolution(q, k, v):
    """DeepViT, CaiT: a 1x1 convolution over the heads."""
    return F.conv2d(scaled(q, k), MIX[:, :, None, None]).softmax(-1) @ v


@refused("linear")
def talking_heads_by_linear(q, k, v):
    scores = F.linear(scaled(q, k).permute(0, 2, 3, 1), MIX).permute(0, 3, 1, 2)
    return scores.softmax(-1) @ v


@refused("probabilities are also read by add")
def probabilities_in_a_loss(q, k, v):
    p = scaled(q, k).softmax(-1)
    return p @ v, (p * (p + 1e-9).log()).sum()


@refused("probabilities are also read by mean")
def probabilities_averaged_over_heads(q, k, v):
    p = scaled(q, k).softmax(-1)
    return p @ v, p.mean(dim=1)


@refused("probabilities are also read by argmax")
def largest_probability(q, k, v):
    p = scaled(q, k).softmax(-1)
    return p @ v, p.argmax(-1)


@refused("mul reads the attention probabilities")
def renormalised_after_masking(q, k, v):
    """Not the softmax of the masked scores when a row of p vanishes: the sum gets an epsilon."""
    p = scaled(q, k).softmax(-1) * causal()
    return (p / (p.sum(-1, keepdim=True) + 1e-3)) @ v


@refused("masked_fill changes the attention probabilities")
def masked_after_softmax(q, k, v):
    return scaled(q, k).softmax(-1).masked_fill(~causal(), 0.0) @ v


@refused("add reads the attention probabilities")
def mask_added_after_softmax(q, k, v):
    return (scaled(q, k).softmax(-1) + causal().float()) @ v


@refused("scores are also read by topk")
def top_k_scores(q, k, v):
    """Sparse attention: what lies below the k-th largest score is hidden."""
    scores = scaled(q, k)
    kth = scores.topk(3, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < kth, -torch.inf).softmax(-1) @ v


@refused("scatter between q k^T and softmax")
def top_k_by_scatter(q, k, v):
    top, index = scaled(q, k).topk(3, dim=-1)
    return torch.full((B, H, S, S), -torch.inf).scatter(-1, index, top).softmax(-1) @ v


@refused("scores are also read by gt")
def thresholded_scores(q, k, v):
    scores = scaled(q, k)
    return torch.where(scores > 0, scores, -torch.inf).softmax(-1) @ v


@refused("threshold reads the attention probabilities")
def thresholded_probabilities(q, k, v):
    return F.threshold(scaled(q, k).softmax(-1), 0.1, 0.0) @ v


@refused("changes scores of visible keys")
def clamped_scores(q, k, v):
    return scaled(q, k).clamp(-1.0, 1.0).softmax(-1) @ v


@refused("changes scores of visible keys")
def clamped_above(q, k, v):
    return scaled(q, k).clamp(max=1.0).softmax(-1) @ v


@refused("changes scores of visible keys")
def clamped_at_a_bias(q, k, v):
    """A floor that is no excluding constant changes scores."""
    return torch.max(scaled(q, k), torch.tensor(-0.5)).softmax(-1) @ v


@refused("sums over another dimension")
def probabilities_transposed(q, k, v):
    return scaled(q, k).softmax(-1).transpose(-1, -2) @ v


@refused("sums over another dimension")
def probabilities_transposed_by_einsum(q, k, v):
    return torch.einsum("bhij,bhid->bhjd", scaled(q, k).softmax(-1), v)


@refused("sums over another dimension")
def summed_over_heads_by_einsum(q, k, v):
    return torch.einsum("bhij,bhjd->bid", scaled(q, k).softmax(-1), v)


@refused("sums over another dimension")
def scores_summed_over_heads_by_einsum(q, k, v):
    return torch.einsum("bhid,bhjd->bij", q, k)[:, None].softmax(-1) @ v


@refused("einsum")
def weighted_heads_by_einsum(q, k, v):
    """A third operand inside the product."""
    weights = torch.arange(1.0, H + 1)
    return torch.einsum("bhid,bhjd,h->bhij", q, k, weights).softmax(-1) @ v


@refused("sums an operand on its own")
def scores_without_contraction(q, k, v):
    """The head_dim of q and of k are summed apart: no product of rows and keys."""
    return torch.einsum("bhid,bhjc->bhij", q, k).softmax(-1) @ v


@refused("scores are also read by transpose")
def scores_symmetrised(q, k, v):
    scores = scaled(q, k)
    return (scores + scores.transpose(-1, -2)).softmax(-1) @ v


@refused("no operand that comes from q k^T")
def scores_shifted(q, k, v):
    """Transformer-XL's rel_shift on the scores themselves."""
    padded = F.pad(scaled(q, k), (1, 0)).view(B, H, S + 1, S)
    return padded[:, :, 1:].reshape(B, H, S, S).softmax(-1) @ v


@refused("roll between q k^T and softmax")
def scores_rolled(q, k, v):
    return scaled(q, k).roll(1, dims=-1).softmax(-1) @ v


@refused("a view cuts the scores across rows and keys")
def scores_regrouped(q, k, v):
    """A view that mixes heads and rows."""
    return scaled(q, k).transpose(1, 2).reshape(B, H, S, S).softmax(-1) @ v


@refused("flip between q k^T and softmax")
def scores_flipped(q, k, v):
    return scaled(q, k).flip(-1).softmax(-1) @ v


@refused("gather between q k^T and softmax")
def scores_gathered(q, k, v):
    """DeBERTa: scores of relative positions, picked per pair."""
    index = (torch.arange(S)[None, :] - torch.arange(S)[:, None]).abs().expand(B, H, S, S)
    return torch.gather(scaled(q, k), -1, index).softmax(-1) @ v


@refused("scores are also read by mean")
def scores_standardised(q, k, v):
    scores = scaled(q, k)
    return ((scores - scores.mean(-1, keepdim=True)) / scores.std(-1, keepdim=True)).softmax(-1) @ v


@refused("scores are also read by abs")
def scores_of_their_size(q, k, v):
    scores = scaled(q, k)
    return (scores / scores.abs().amax(-1, keepdim=True)).softmax(-1) @ v


@refused("layer_norm")
def scores_normalised(q, k, v):
    return F.layer_norm(scaled(q, k), (S,)).softmax(-1) @ v


@refused("multiplied by a tensor of shape [10, 10]")
def causal_by_multiplication(q, k, v):
    """A score of zero is visible."""
    return (scaled(q, k) * causal()).softmax(-1) @ v


@refused("tril between q k^T and softmax")
def scores_zeroed_above_the_diagonal(q, k, v):
    return scaled(q, k).tril().softmax(-1) @ v


@refused("hidden scores become 0.0")
def filled_with_zero(q, k, v):
    return scaled(q, k).masked_fill(~causal(), 0.0).softmax(-1) @ v


@refused("which does not exclude them")
def filled_with_large_positive(q, k, v):
    return scaled(q, k).masked_fill(causal(), 1e9).softmax(-1) @ v


@refused("multiplied by a tensor")
def minus_10000_where_masked(q, k, v):
    """The OpenAI GPT form with 1e4: a hidden key still weighs exp(-1e4 - max), and that is a bias."""
    b = causal().float()
    return (scaled(q, k) * b - 1e4 * (1 - b)).softmax(-1) @ v


@refused("a mask is applied before a scale")
def temperature_after_the_mask(q, k, v):
    """A scale from the rows, over a finite mask."""
    t = q.norm(dim=-1, keepdim=True)
    return (scaled(q, k).masked_fill(~causal(), -1e9) * t).softmax(-1) @ v


@refused("mul reads the attention probabilities")
def gate_on_probabilities(q, k, v):
    return (scaled(q, k).softmax(-1) * torch.sigmoid(v.mean(-1)).unsqueeze(-2)) @ v


@refused("cumsum reads the attention probabilities")
def accumulated_probabilities(q, k, v):
    return scaled(q, k).softmax(-1).cumsum(-1) @ v


@refused("sub reads the attention probabilities")
def probabilities_minus_their_mean(q, k, v):
    """Differential attention within one map."""
    return (scaled(q, k).softmax(-1) - 1 / S) @ v


@refused("probabilities are also read by matmul")
def one_map_twice(q, k, v):
    p = scaled(q, k).softmax(-1)
    return p @ (p @ v)


@refused("probabilities are also read by argmax")
def straight_through(q, k, v):
    p = scaled(q, k).softmax(-1)
    hard = F.one_hot(p.argmax(-1), S).to(p.dtype)
    return (hard - p.detach() + p) @ v


@refused("add reads the attention probabilities")
def softmax_plus_identity(q, k, v):
    return (scaled(q, k).softmax(-1) + torch.eye(S)) @ v


@refused("mul reads the attention probabilities")
def quantised_probabilities(q, k, v):
    return (scaled(q, k).softmax(-1) * 255).round().div(255) @ v


@refused("rounds the scores to torch.int32")
def integer_scores(q, k, v):
    """A cast that drops digits is no rounding."""
    return scaled(q, k).to(torch.int32).float().softmax(-1) @ v


@refused("is written in place")
def written_between(q, k, v):
    """The query is scaled after its product."""
    scores = scaled(q, k)
    q.mul_(2.0)
    return scores.softmax(-1) @ v + q


@refused("probabilities are also read by setitem")
def probabilities_written(q, k, v):
    p = scaled(q, k).softmax(-1)
    p[..., 0] = 0.0
    return p @ v


@refused("scores are also read by setitem")
def scores_written(q, k, v):
    scores = scaled(q, k)
    scores[..., 0] = 1.0
    return scores.softmax(-1) @ v
