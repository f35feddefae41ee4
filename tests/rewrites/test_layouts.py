"""Spellings and layouts beyond ``[batch, heads, seqlen, head_dim]``: fused, and the same numbers."""

import pytest
import torch

from attnpatch.testing.recording import check_rewrite

B, H, S, D = 2, 4, 12, 16


def qkv():
    return tuple(torch.randn(B, H, S, D) for _ in range(3))


def scores_of(q, k):
    return q @ k.transpose(-1, -2) * 0.25


def fused(function, *args):
    """The one site of ``function``, fused and equal, without a tensor of all scores."""
    recording = check_rewrite(function, *args)
    assert recording.reasons == []
    assert len(recording.sites) == 1
    assert recording.square_nodes(S, S) == []
    return recording.sites[0]


def reads_logsumexp(q, k, v):
    """Granite with a sliding window: the output is scaled by sigmoid(lse - sink)."""
    scores = scores_of(q, k)
    return (scores.softmax(-1) @ v) * torch.sigmoid(torch.logsumexp(scores, dim=-1, keepdim=True))


def sinks_by_cat(q, k, v):
    """GPT-OSS: one more column in the softmax, cut off after it."""
    scores = torch.cat([scores_of(q, k), torch.ones(B, H, S, 1)], dim=-1)
    return scores.softmax(-1)[..., :-1] @ v


def scale_on_one_row(q, k, v):
    return (scores_of(q, k) * torch.arange(S)[:, None]).softmax(-1) @ v


def einsum_scores(q, k, v):
    return torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1) @ v


def einsum_output(q, k, v):
    return torch.einsum("bhqk,bhkd->bhqd", scores_of(q, k).softmax(-1), v)


def baddbmm(q, k, v):
    q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
    bias = torch.zeros(B * H, 1, S)
    return torch.bmm(bias.baddbmm(q, k.transpose(-1, -2), beta=1.0, alpha=0.25).softmax(-1), v)


def add_with_alpha(q, k, v):
    return torch.add(scores_of(q, k), torch.ones(S, S), alpha=2).softmax(-1) @ v


SPELLINGS = [reads_logsumexp, sinks_by_cat, scale_on_one_row, einsum_scores, einsum_output, add_with_alpha]


@pytest.mark.parametrize("function", SPELLINGS, ids=[f.__name__ for f in SPELLINGS])
def test_spelling(function):
    site = fused(function, *qkv())
    assert (site.num_heads, site.num_kv_heads, site.head_dim) == (H, H, D)


def test_baddbmm():
    """Heads merged into the batch by a reshape are found again; a bias of zeros is none."""
    site = fused(baddbmm, *qkv())
    assert (site.num_heads, site.mask) == (H, "none")


def test_scale_per_head():
    """A learned temperature per head multiplies q instead of the scores."""

    def function(q, k, v, t):
        return (q @ k.transpose(-1, -2) * t).softmax(-1) @ v

    fused(function, *qkv(), torch.rand(H, 1, 1))


def alibi(q, k, v, slopes, bias_of):
    rows, keys = torch.arange(S)[:, None], torch.arange(S)[None, :]
    scores = scores_of(q, k) + bias_of(slopes, rows, keys)
    return scores.masked_fill(keys > rows, -torch.inf).softmax(-1) @ v


ALIBI = {
    "key minus row": lambda slopes, rows, keys: slopes[:, None, None] * (keys - rows),
    "row minus key": lambda slopes, rows, keys: -(slopes[:, None, None] * (rows - keys).float()),
    "distance": lambda slopes, rows, keys: slopes.view(1, -1, 1, 1) * -(rows - keys).abs(),
    "minus distance": lambda slopes, rows, keys: -1.0 * (keys - rows).abs() * slopes[None, :, None, None],
}


@pytest.mark.parametrize("bias_of", ALIBI.values(), ids=ALIBI)
def test_alibi(bias_of):
    """Slopes times distances: no bias of all rows and keys."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    site = fused(lambda q, k, v, slopes: alibi(q, k, v, slopes, bias_of), *qkv(), slopes)
    assert site.mask == "causal, ALiBi"


def test_alibi_on_both_sides():
    """Without a causal mask the distance is what counts."""

    def function(q, k, v, slopes):
        away = (torch.arange(S)[:, None] - torch.arange(S)[None, :]).abs()
        return (scores_of(q, k) - slopes[:, None, None] * away).softmax(-1) @ v

    fused(function, *qkv(), torch.rand(H))


def test_slopes_that_grow_with_the_key_are_no_alibi():
    """Signed distances without a causal mask favour keys ahead."""

    def function(q, k, v, slopes):
        ahead = torch.arange(S)[None, :] - torch.arange(S)[:, None]
        return (scores_of(q, k) + slopes[:, None, None] * ahead).softmax(-1) @ v

    recording = check_rewrite(function, *qkv(), torch.rand(H))
    assert recording.masks == [f"streamed bias [{H}, {S}, {S}]"]


def joined(scores):
    """Scores and one more column."""
    return torch.cat([scores, torch.ones(B, H, S, 1)], dim=-1)


def shifted(scores):
    return scores - scores.amax(-1, keepdim=True)


NO_SINKS = {
    "another column": (
        lambda q, k, v: joined(scores_of(q, k)).softmax(-1)[..., 1:] @ v,
        "takes a part of the scores or probabilities",
    ),
    "in front": (
        lambda q, k, v: torch.cat([torch.ones(B, H, S, 1), scores_of(q, k)], -1).softmax(-1)[..., :-1] @ v,
        "concatenated with others",
    ),
    "with a value": (
        lambda q, k, v: joined(scores_of(q, k)).softmax(-1) @ torch.cat([v, v[:, :, :1]], 2),
        "does not leave out the sinks",
    ),
    "joins after the shift": (
        lambda q, k, v: joined(shifted(scores_of(q, k))).softmax(-1)[..., :-1] @ v,
        "the scores are shifted, and the sinks are not",
    ),
    "fewer keys": (
        lambda q, k, v: scores_of(q, k)[..., :-1].softmax(-1) @ v[:, :, :-1],
        "takes a part of the scores or probabilities",
    ),
    "fewer values": (
        lambda q, k, v: scores_of(q, k).softmax(-1)[..., :-1] @ v[:, :, :-1],
        "takes a part of the scores or probabilities",
    ),
}


@pytest.mark.parametrize(("function", "reason"), NO_SINKS.values(), ids=NO_SINKS)
def test_no_sinks(function, reason):
    recording = check_rewrite(function, *qkv())
    assert len(recording.reasons) == 1
    assert reason in recording.reasons[0]


def sinks(q, k, v, sink):
    """GPT-OSS: learned logits, shifted together with the scores."""
    scores = scores_of(q, k).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    both = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(B, -1, S, -1)], dim=-1)
    both = both - both.max(dim=-1, keepdim=True).values
    return both.softmax(-1)[..., :-1] @ v


def test_learned_sinks():
    assert fused(sinks, *qkv(), torch.randn(H)).mask == "causal"


def test_view_that_splits_the_features_of_the_output():
    """After bmm over merged heads, one view takes heads and halves of the features apart."""

    def function(q, k, v):
        q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
        o = torch.bmm((torch.bmm(q, k.transpose(1, 2)) * 0.25).softmax(-1), v)
        return o.view(B, H, S, 2, D // 2).transpose(1, 2)

    assert fused(function, *qkv()).num_heads == H


def test_alibi_inside_a_mask_that_stays_streamed():
    """The slopes are in the streamed tensor already: they must not be added twice."""

    def function(q, k, v, slopes, keep):
        rows, keys = torch.arange(S)[:, None], torch.arange(S)[None, :]
        bias = torch.where(keep, slopes[:, None, None] * (keys - rows), -torch.inf)
        scores = (scores_of(q, k) + bias).masked_fill(keys > rows, -torch.inf)
        return scores.softmax(-1) @ v

    keep = torch.rand(S, S) < 0.7
    keep.fill_diagonal_(True)
    recording = check_rewrite(function, *qkv(), torch.rand(H), keep)
    assert recording.masks == [f"causal, streamed bias [{H}, {S}, {S}]"]


def scaled_flat(q, k, v):
    """Rows and keys merged while the scores are scaled."""
    return ((q @ k.transpose(-1, -2)).view(B, H, S * S) * torch.linspace(0.5, 1.5, S * S)).view(B, H, S, S).softmax(
        -1
    ) @ v


def cut_before_softmax(q, k, v):
    return joined(scores_of(q, k))[..., :-1].softmax(-1) @ v


def sinks_then_written(q, k, v, sink):
    """The logits change after softmax has read them."""
    sink = sink.clone()
    weights = joined_with(scores_of(q, k), sink).softmax(-1)[..., :-1]
    sink.mul_(3.0)
    return weights @ v + sink.sum()


def joined_with(scores, sink):
    return torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(B, -1, S, -1)], dim=-1)


@pytest.mark.parametrize("function", [scaled_flat, cut_before_softmax], ids=lambda f: f.__name__)
def test_refused_and_not_a_crash(function):
    assert len(check_rewrite(function, *qkv()).reasons) == 1


def test_sinks_written_after_they_were_read():
    check_rewrite(sinks_then_written, *qkv(), torch.randn(H))
