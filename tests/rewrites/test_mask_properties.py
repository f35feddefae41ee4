"""Random masks: whatever conditions are combined, and however they are written, the numbers stay."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnpatch.testing.recording import check_rewrite

RANDOM = settings(
    max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

small = st.integers(-3, 4)


class Condition:
    """A bool tensor over (batch, query, key) as the model code that builds it.

    Args:
        build: called with the row indices ``[q, 1]``, key indices ``[1, k]`` and padding ``[batch, k]``.
        text: for Hypothesis' report.
    """

    def __init__(self, build, text):
        self.build, self.text = build, text

    def __repr__(self):
        return self.text


def square(rows, keys):
    return torch.ones(rows.shape[0], keys.shape[1], dtype=torch.bool)


TERMS = {
    "k <= q + {}": lambda c: lambda q, k, m: k <= q + c,
    "q - k >= {}": lambda c: lambda q, k, m: q - k >= c,
    "k > q - {}": lambda c: lambda q, k, m: k > q - c,
    "|q - k| < {}": lambda c: lambda q, k, m: (q - k).abs() < c,
    "|k - q| > {}": lambda c: lambda q, k, m: (k - q).abs() > c,
    "tril({})": lambda c: lambda q, k, m: square(q, k).tril(c),
    "triu({})": lambda c: lambda q, k, m: square(q, k).triu(c),
    "tril({}) == 0": lambda c: lambda q, k, m: square(q, k).float().tril(c) == 0,
    "k < {}": lambda c: lambda q, k, m: k < c,
    "q >= {}": lambda c: lambda q, k, m: q >= c,
    "padding {}": lambda c: lambda q, k, m: m[:, None, :],
    "shifted padding {}": lambda c: lambda q, k, m: m.roll(c, 1)[:, None, :],
    "gathered padding {}": lambda c: lambda q, k, m: m[torch.arange(m.shape[0])[:, None, None], k[None]],
    "all {}": lambda c: lambda q, k, m: square(q, k),
    "q == k + {}": lambda c: lambda q, k, m: q == k + c,
}


def term(item):
    name, c = item
    return Condition(TERMS[name](c), name.format(c))


def negate(a):
    return Condition(lambda q, k, m: ~a.build(q, k, m), f"not ({a})")


def both(pair):
    a, b = pair
    return Condition(lambda q, k, m: a.build(q, k, m) & b.build(q, k, m), f"({a} and {b})")


def either(pair):
    a, b = pair
    return Condition(lambda q, k, m: a.build(q, k, m) | b.build(q, k, m), f"({a} or {b})")


def filled(pair):
    a, b = pair
    return Condition(
        lambda q, k, m: square(q, k) & a.build(q, k, m).masked_fill(~b.build(q, k, m), False), f"({a} of {b})"
    )


conditions = st.recursive(
    st.tuples(st.sampled_from(sorted(TERMS)), small).map(term),
    lambda inner: st.one_of(
        inner.map(negate),
        st.tuples(inner, inner).map(both),
        st.tuples(inner, inner).map(both),
        st.tuples(inner, inner).map(either),
        st.tuples(inner, inner).map(filled),
    ),
    max_leaves=4,
)

MIN = torch.finfo(torch.float32).min

APPLIED = {
    "masked_fill": lambda s, keep: s.masked_fill(~keep, -torch.inf),
    "where": lambda s, keep: torch.where(keep, s, -1e9),
    "bias": lambda s, keep: s + torch.where(keep, 0.0, MIN),
    "bias_fill": lambda s, keep: s + torch.zeros(keep.shape).masked_fill(~keep, MIN),
    "one_minus": lambda s, keep: s + (1.0 - keep.float()) * MIN,
    "not_equal": lambda s, keep: s.masked_fill(keep.float() == 0, -torch.inf),
}


def padding(batch, seqlen_k, seed):
    return torch.rand(batch, seqlen_k, generator=torch.Generator().manual_seed(seed)) > 0.3


@RANDOM
@given(
    condition=conditions,
    applied=st.sampled_from(sorted(APPLIED)),
    batch=st.integers(1, 2),
    seqlen_q=st.integers(1, 5),
    seqlen_k=st.integers(2, 7),
    aligned=st.booleans(),
    dynamic=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_composition_keeps_the_numbers(condition, applied, batch, seqlen_q, seqlen_k, aligned, dynamic, seed):
    """Causal, window, padding and anything opaque, under and, or, not."""
    offset = seqlen_k - seqlen_q if aligned else 0

    def mask(q, k, padding):
        rows = torch.arange(q.shape[2])[:, None] + offset
        return condition.build(rows, torch.arange(k.shape[2])[None, :], padding)

    def function(q, k, v, padding):
        keep = mask(q, k, padding)
        keep = keep[:, None] if keep.dim() == 3 else keep[None, None]
        return APPLIED[applied](q @ k.transpose(-1, -2), keep).softmax(-1) @ v

    q, k, v = (torch.randn(batch, 2, n, 4) for n in (seqlen_q, seqlen_k, seqlen_k))
    m = padding(batch, seqlen_k, seed)
    visible = mask(q, k, m).any(-1).expand(batch if mask(q, k, m).dim() == 3 else 1, seqlen_q)
    recording = check_rewrite(function, q, k, v, m, rows=visible[:, None], dynamic=dynamic)
    assert len(recording.sites) == 1
    assert recording.reasons == []


liftable = st.lists(
    st.tuples(
        st.sampled_from(["k <= q + {}", "q - k >= {}", "k > q - {}", "tril({})", "triu({})", "padding {}", "all {}"]),
        st.integers(0, 3),
    ).map(term),
    min_size=1,
    max_size=4,
)


@settings(RANDOM, max_examples=20)
@given(terms=liftable, applied=st.sampled_from(sorted(APPLIED)), seed=st.integers(0, 9))
def test_conjunctions_of_terms_are_lifted(terms, applied, seed):
    """Any number of bands and paddings is one band and one padding: nothing N x N is left."""
    seqlen = 6

    def function(q, k, v, padding):
        rows, keys = torch.arange(seqlen)[:, None], torch.arange(seqlen)[None, :]
        keep = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        for condition in terms:
            part = condition.build(rows, keys, padding)
            keep = keep & (part[:, None] if part.dim() == 3 else part)
        return APPLIED[applied](q @ k.transpose(-1, -2), keep).softmax(-1) @ v

    q, k, v = (torch.randn(2, 2, seqlen, 4) for _ in range(3))
    m = padding(2, seqlen, seed)
    keep = torch.ones(2, seqlen, seqlen, dtype=torch.bool)
    for condition in terms:
        keep &= condition.build(torch.arange(seqlen)[:, None], torch.arange(seqlen)[None, :], m)
    recording = check_rewrite(function, q, k, v, m, rows=keep.any(-1)[:, None])
    assert "streamed" not in recording.masks[0]
    assert recording.square_nodes(seqlen, seqlen) == []
