"""What must be left alone: refused with its reason, and the graph exactly as it was."""

import pytest
import torch
import torch.nn.functional as F

from attnpatch.testing.recording import check_rewrite, record

B, H, S, D = 2, 4, 12, 16


def qkv():
    return tuple(torch.randn(B, H, S, D) for _ in range(3))


def scores_of(q, k):
    return q @ k.transpose(-1, -2) * 0.25


def refused(function, *args, **kwargs):
    """The reason why the one site of ``function`` stays; graph and output must be those of the original."""
    torch.manual_seed(1)
    recording = record(function, *args, **kwargs)
    assert recording.masks == []
    assert len(recording.reasons) == 1, recording.sites
    assert recording.after == recording.before
    assert recording.named("attention") == []
    torch.manual_seed(1)
    torch.testing.assert_close(recording.output, function(*args), rtol=0, atol=0, equal_nan=True)
    return recording.reasons[0]


def returns_probabilities(q, k, v):
    p = scores_of(q, k).softmax(-1)
    return p @ v, p


def returns_cast_probabilities(q, k, v):
    p = F.softmax(scores_of(q, k), dim=-1, dtype=torch.float32).to(q.dtype)
    return p @ v, p


def returns_dropped_probabilities(q, k, v):
    p = F.dropout(scores_of(q, k).softmax(-1), p=0.0, training=False)
    return p @ v, p


def returns_scores(q, k, v):
    scores = scores_of(q, k)
    return scores.softmax(-1) @ v, scores


def returns_raw_scores(q, k, v):
    scores = q @ k.transpose(-1, -2)
    return (scores * 0.25).softmax(-1) @ v, scores


def probabilities_feed_two_products(q, k, v):
    p = scores_of(q, k).softmax(-1)
    return p @ v + p @ k


def probabilities_summed(q, k, v):
    p = scores_of(q, k).softmax(-1)
    return p @ v + p.sum(dim=-1, keepdim=True)


def probabilities_changed(q, k, v):
    return (scores_of(q, k).softmax(-1) * 0.5) @ v


def probabilities_masked(q, k, v):
    return scores_of(q, k).softmax(-1).tril() @ v


def dropout_in_training(q, k, v):
    return F.dropout(scores_of(q, k).softmax(-1), p=0.1, training=True) @ v


def dropout_by_default(q, k, v):
    return F.dropout(scores_of(q, k).softmax(-1)) @ v


def softmax_over_queries(q, k, v):
    return scores_of(q, k).softmax(-2) @ v


def softmax_over_heads(q, k, v):
    return scores_of(q, k).softmax(1) @ v


def two_softcaps(q, k, v):
    return (torch.tanh(torch.tanh(scores_of(q, k)) * 3.0)).softmax(-1) @ v


def mask_before_softcap(q, k, v):
    scores = scores_of(q, k) + torch.full((S, S), -torch.inf).triu(1)
    return (torch.tanh(scores / 5.0) * 5.0).softmax(-1) @ v


def fill_before_softcap(q, k, v):
    scores = scores_of(q, k).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -1e9)
    return (torch.tanh(scores / 5.0) * 5.0).softmax(-1) @ v


def filled_with_minus_100(q, k, v):
    return scores_of(q, k).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -100.0).softmax(-1) @ v


def filled_with_minus_10000(q, k, v):
    return torch.where(torch.ones(S, S, dtype=torch.bool).tril(), scores_of(q, k), -10000.0).softmax(-1) @ v


def negative_scale(q, k, v):
    return (q @ k.transpose(-1, -2) * -0.25).softmax(-1) @ v


def zero_scale(q, k, v):
    return (q @ k.transpose(-1, -2) * 0.0).softmax(-1) @ v


def scores_as_divisor(q, k, v):
    return (1.0 / scores_of(q, k)).softmax(-1) @ v


def relu_on_scores(q, k, v):
    return torch.relu(scores_of(q, k)).softmax(-1) @ v


def squared_scores(q, k, v):
    return (scores_of(q, k) ** 2).softmax(-1) @ v


def subtracted_from(q, k, v):
    return (1.0 - scores_of(q, k)).softmax(-1) @ v


REFUSED = {
    returns_probabilities: "they are returned (output_attentions)",
    returns_cast_probabilities: "they are returned (output_attentions)",
    returns_dropped_probabilities: "they are returned (output_attentions)",
    returns_scores: "scores are also read by the caller",
    returns_raw_scores: "scores are also read by the caller",
    probabilities_feed_two_products: "probabilities are also read by matmul",
    probabilities_summed: "probabilities are also read by sum",
    probabilities_changed: "mul reads the attention probabilities",
    probabilities_masked: "tril reads the attention probabilities",
    dropout_in_training: "dropout with p=0.1 is active in training",
    dropout_by_default: "dropout with p=0.5 is active in training",
    softmax_over_queries: "softmax is over dim -2",
    softmax_over_heads: "softmax is over dim 1",
    two_softcaps: "two tanh",
    mask_before_softcap: "a mask is applied before the softcap",
    fill_before_softcap: "a mask is applied before the softcap",
    filled_with_minus_100: "does not exclude them",
    filled_with_minus_10000: "does not exclude them",
    negative_scale: "not by a positive number",
    zero_scale: "not by a positive number",
    scores_as_divisor: "the scores are a divisor",
    relu_on_scores: "relu between q k^T and softmax is not understood",
    squared_scores: "pow between q k^T and softmax is not understood",
    subtracted_from: "the scores are subtracted",
}


@pytest.mark.parametrize(("function", "reason"), REFUSED.items(), ids=[f.__name__ for f in REFUSED])
def test_refused(function, reason):
    assert reason in refused(function, *qkv())


def test_run_time_scale_after_a_mask():
    """mask * t is no exclusion for every t."""

    def function(q, k, v, t):
        scores = q @ k.transpose(-1, -2) + torch.full((S, S), -1e9).triu(1)
        return (scores * t).softmax(-1) @ v

    assert "before a scale that is known only at run time" in refused(function, *qkv(), torch.tensor(0.5))


def test_run_time_scale_after_a_bias():
    def function(q, k, v, bias, t):
        return ((q @ k.transpose(-1, -2) + bias) * t).softmax(-1) @ v

    reason = refused(function, *qkv(), torch.randn(S, S), torch.tensor(0.5))
    assert "before a scale that is known only at run time" in reason


def test_run_time_softcap():
    def function(q, k, v, cap):
        return (torch.tanh(q @ k.transpose(-1, -2) / cap) * cap).softmax(-1) @ v

    assert "run time" in refused(function, *qkv(), torch.tensor(5.0))


def test_fill_known_only_at_run_time():
    def function(q, k, v, fill):
        hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
        return torch.where(hidden, fill, q @ k.transpose(-1, -2)).softmax(-1) @ v

    assert "does not exclude them" in refused(function, *qkv(), torch.tensor(-1e9))


def test_scores_broadcast_by_the_mask():
    """A mask with a batch of its own makes more scores than q has rows."""
    args = torch.randn(1, H, S, D), torch.randn(1, H, S, D), torch.randn(1, H, S, D), torch.randn(B, 1, S, S)
    reason = refused(lambda q, k, v, m: (scores_of(q, k) + m).softmax(-1) @ v, *args)
    assert "broadcasts the scores" in reason


def test_a_refused_site_does_not_stop_the_next_one():
    def function(q, k, v):
        o, p = returns_probabilities(q, k, v)
        return scores_of(o, k).softmax(-1) @ v, p

    recording = record(function, *qkv())
    assert [site.fused for site in recording.sites] == [False, True]


def test_every_site_is_refused_for_its_own_reason():
    def function(q, k, v):
        o, p = returns_probabilities(q, k, v)
        return softmax_over_queries(o, k, v), p

    reasons = record(function, *qkv()).reasons
    assert "output_attentions" in reasons[0]
    assert "softmax is over dim -2" in reasons[1]


def router(x, w):
    return (x @ w).softmax(-1)


def router_with_top_k(x, w):
    weights, _ = (x @ w).softmax(dim=-1).topk(2)
    return weights / weights.sum(-1, keepdim=True)


def mixture_of_experts(x, w):
    """Probabilities weigh experts, by a product of matrices that belong to no sequence."""
    p = F.linear(x, w.t()).softmax(-1)
    return p @ w.t()


def attention_pooling(x, w):
    """A learned query over the tokens: scores come from a vector, not from q k^T."""
    return (x @ w[:, :1]).softmax(dim=1).transpose(1, 2) @ x


def log_probabilities(x, w):
    return torch.log_softmax(x @ w, dim=-1)


def products_without_softmax(x, w):
    return (x @ x.transpose(-1, -2)).relu() @ x


NO_SITE = [
    router,
    router_with_top_k,
    mixture_of_experts,
    attention_pooling,
    log_probabilities,
    products_without_softmax,
]


@pytest.mark.parametrize("function", NO_SITE, ids=[f.__name__ for f in NO_SITE])
def test_no_attention(function):
    recording = check_rewrite(function, torch.randn(B, S, D), torch.randn(D, D))
    assert recording.sites == []
    assert recording.after == recording.before


def test_place_names_the_line():
    recording = record(returns_probabilities, *qkv())
    assert recording.sites[0].place.startswith("test_refusals.py:")
    assert recording.sites[0].place.endswith("in returns_probabilities")


def test_module_names_the_path():
    class Attention(torch.nn.Module):
        def forward(self, x):
            return scores_of(x, x).softmax(-1) @ x

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Attention(), Attention()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    recording = record(Model(), torch.randn(B, H, S, D))
    assert [site.module for site in recording.sites] == ["layers.0", "layers.1"]
