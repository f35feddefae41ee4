"""Masks read back into terms: causal, offset, window and padding in every spelling; the rest is streamed."""

import pytest
import torch

from attnpatch.testing.recording import check_rewrite
from tests.combinations import in_turn

B, H, S, D = 2, 4, 12, 16
MIN = torch.finfo(torch.float32).min


def qkv(seqlen_q=S, seqlen_k=S, dtype=torch.float32):
    return tuple(torch.randn(B, H, n, D).to(dtype) for n in (seqlen_q, seqlen_k, seqlen_k))


def attend(q, k, v, mask):
    """Additive or bool (True = keep) mask, as eager models apply it."""
    scores = q @ k.transpose(-1, -2) * 0.25
    scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(dim=-1) @ v


def check(make_mask, *args, words, seqlen_q=S, seqlen_k=S, **kwargs):
    """One site, fused, with ``words`` as its mask; when these name no streamed tensor, nothing N x N is left."""

    def function(q, k, v, *rest):
        return attend(q, k, v, make_mask(*rest))

    recording = check_rewrite(function, *qkv(seqlen_q, seqlen_k), *args, **kwargs)
    assert recording.reasons == []
    assert recording.masks == [words]
    if "streamed" not in words:
        assert recording.square_nodes(seqlen_q, seqlen_k) == []
    return recording


def indices(seqlen_q=S, seqlen_k=S):
    return torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]


def ones():
    return torch.ones(S, S, dtype=torch.bool)


CAUSAL = {
    "tril_bool": lambda: torch.tril(ones()),
    "tril_method": lambda: ones().tril(),
    "tril_batched": lambda: torch.tril(torch.ones(1, 1, S, S, dtype=torch.bool)),
    "tril_float_bool": lambda: torch.tril(torch.ones(S, S)).bool(),
    "tril_float_to_bool": lambda: torch.tril(torch.ones(S, S)).to(torch.bool),
    "tril_equals_one": lambda: torch.tril(torch.ones(S, S)) == 1,
    "tril_not_zero": lambda: torch.tril(torch.ones(S, S)) != 0,
    "tril_view": lambda: torch.tril(torch.ones(S, S)).view(1, 1, S, S) > 0,
    "not_triu": lambda: ~torch.triu(ones(), diagonal=1),
    "logical_not_triu": lambda: torch.triu(ones(), 1).logical_not(),
    "triu_equals_zero": lambda: torch.triu(torch.ones(S, S), 1) == 0,
    "triu_of_inf": lambda: torch.triu(torch.full((S, S), -torch.inf), diagonal=1),
    "triu_of_min": lambda: torch.full((S, S), MIN).triu(1),
    "fill_of_triu": lambda: torch.zeros(S, S).masked_fill(torch.triu(ones(), 1), -torch.inf),
    "fill_where_tril_is_zero": lambda: torch.zeros(S, S).masked_fill(torch.tril(torch.ones(S, S)) == 0, -torch.inf),
    "fill_where_not_tril": lambda: torch.zeros(S, S).masked_fill(~torch.tril(ones()), -1e9),
    "one_minus_tril_times_min": lambda: (1.0 - torch.tril(torch.ones(S, S))) * MIN,
    "one_minus_tril_times_1e9": lambda: (1 - torch.tril(torch.ones(S, S))) * -1e9,
    "not_tril_times_min": lambda: (~torch.tril(ones())) * MIN,
    "not_tril_float_times_min": lambda: (~torch.tril(ones())).float() * MIN,
    "le": lambda: indices()[1] <= indices()[0],
    "lt_plus_one": lambda: indices()[1] < indices()[0] + 1,
    "ge": lambda: indices()[0] >= indices()[1],
    "gt_minus_one": lambda: indices()[0] > indices()[1] - 1,
    "difference": lambda: indices()[0] - indices()[1] >= 0,
    "not_gt": lambda: ~(indices()[1] > indices()[0]),
    "view": lambda: torch.arange(S).view(1, 1, S, 1) >= torch.arange(S).view(1, 1, 1, S),
    "unsqueeze": lambda: torch.arange(S).unsqueeze(-1) >= torch.arange(S).unsqueeze(0),
    "transposed": lambda: (indices()[0] <= indices()[1]).transpose(0, 1),
    "expanded": lambda: (indices()[1] <= indices()[0])[None, None].expand(B, 1, S, S),
    "where_scalars": lambda: torch.where(indices()[1] <= indices()[0], 0.0, -torch.inf),
    "where_tensor": lambda: torch.where(indices()[1] <= indices()[0], torch.tensor(0.0), MIN),
    "where_swapped": lambda: torch.where(indices()[1] > indices()[0], MIN, 0.0),
    "where_zeros": lambda: torch.where(torch.tril(ones()), torch.zeros(S, S), torch.full((S, S), MIN)),
    "sum_of_two": lambda: torch.full((S, S), MIN).triu(1) + torch.zeros(S, S).masked_fill(~ones().tril(), MIN),
    "and_of_two": lambda: ones().tril() & (indices()[1] <= indices()[0]),
    "new_ones": lambda: torch.arange(S).new_ones((), dtype=torch.bool) & (indices()[1] <= indices()[0]),
    "slice_of_buffer": lambda: torch.tril(torch.ones(2 * S, 2 * S, dtype=torch.bool))[:S, :S],
    "slice_of_4d": lambda: torch.tril(torch.ones(1, 1, 32, 32, dtype=torch.bool))[:, :, :S, :S],
}


@pytest.mark.parametrize("make_mask", CAUSAL.values(), ids=CAUSAL)
def test_causal(make_mask):
    check(make_mask, words="causal")


@pytest.mark.parametrize("fill", [-torch.inf, MIN, -1e9, -1e10, torch.finfo(torch.bfloat16).min], ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["masked_fill", "masked_fill_"])
def test_scores_filled(fill, in_place):
    def function(q, k, v):
        scores = q @ k.transpose(-1, -2) * 0.25
        hidden = torch.triu(torch.ones(S, S, dtype=torch.bool), diagonal=1)
        scores = scores.masked_fill_(hidden, fill) if in_place else scores.masked_fill(hidden, fill)
        return scores.softmax(dim=-1) @ v

    recording = check_rewrite(function, *qkv())
    assert recording.masks == ["causal"]
    assert recording.square_nodes(S, S) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_minimum_of_the_models_dtype_excludes(dtype):
    def function(q, k, v):
        mask = torch.full((S, S), torch.finfo(dtype).min, dtype=dtype).triu(1)
        return (q @ k.transpose(-1, -2) * 0.25 + mask).softmax(dim=-1) @ v

    assert check_rewrite(function, *qkv(dtype=dtype)).masks == ["causal"]


OFFSETS = {
    "prefill": (5, 5),
    "chunk_after_7": (5, 12),
    "one_row": (1, 12),
    "more_rows_than_keys": (12, 5),
}


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("upper_left", [False, True], ids=["bottom_right", "upper_left"])
def test_causal_offset(seqlen_q, seqlen_k, upper_left):
    offset = 0 if upper_left else seqlen_k - seqlen_q

    def make_mask():
        q, k = indices(seqlen_q, seqlen_k)
        return k <= q + offset

    rows = torch.arange(seqlen_q) + offset >= 0
    check(make_mask, words="causal", seqlen_q=seqlen_q, seqlen_k=seqlen_k, rows=rows)


@pytest.mark.parametrize("diagonal", [-3, -1, 0, 2, 7])
def test_tril_diagonal(diagonal):
    rows = torch.arange(S) + diagonal >= 0
    recording = check_rewrite(
        lambda q, k, v: attend(q, k, v, torch.ones(S, S, dtype=torch.bool).tril(diagonal)), *qkv(), rows=rows
    )
    assert recording.masks == ["causal"]
    assert recording.square_nodes(S, S) == []


def test_triu_alone_hides_the_past():
    recording = check_rewrite(lambda q, k, v: attend(q, k, v, torch.ones(S, S, dtype=torch.bool).triu()), *qkv())
    assert recording.masks == ["window 0 left, all right"]
    assert recording.square_nodes(S, S) == []


@pytest.mark.parametrize("seqlen_q", [1, 3], ids=["decode", "append"])
def test_offset_as_symint(seqlen_q):
    def function(q, k, v, offset):
        rows, keys = torch.arange(q.shape[2])[:, None] + offset, torch.arange(k.shape[2])[None, :]
        return attend(q, k, v, keys <= rows)

    recording = check_rewrite(function, *qkv(seqlen_q, S), 7, dynamic=True)
    assert recording.masks == ["causal"]
    assert recording.square_nodes(seqlen_q, S) == []


def test_offset_as_difference_of_lengths():
    def function(q, k, v):
        keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return attend(q, k, v, keep)

    recording = check_rewrite(function, *qkv(5, S), dynamic=True)
    assert recording.masks == ["causal"]
    assert recording.square_nodes(5, S) == []


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 3], ids=["decode", "append"])
def test_offset_as_tensor(seqlen_q, dtype):
    def function(q, k, v, offset):
        rows, keys = torch.arange(seqlen_q)[:, None] + offset, torch.arange(S)[None, :]
        return attend(q, k, v, keys <= rows)

    recording = check_rewrite(function, *qkv(seqlen_q, S), torch.tensor(6, dtype=dtype))
    assert recording.masks == ["causal"]
    assert recording.square_nodes(seqlen_q, S) == []


def test_offset_per_sequence_is_streamed_or_lifted_right():
    def function(q, k, v, offset):
        rows = torch.arange(3)[None, None, :, None] + offset[:, None, None, None]
        return attend(q, k, v, torch.arange(S)[None, None, None, :] <= rows)

    assert len(check_rewrite(function, *qkv(3, S), torch.tensor([4, 7])).masks) == 1


def window(width):
    q, k = indices()
    return (k <= q) & (k > q - width)


WINDOWS = {
    "causal_4": (lambda: window(4), "causal, window 4"),
    "causal_1": (lambda: window(1), "causal, window 1"),
    "wider_than_the_sequence": (lambda: window(64), "causal, window 64"),
    "difference": (lambda: (indices()[0] - indices()[1] < 4) & (indices()[0] >= indices()[1]), "causal, window 4"),
    "tril_triu": (lambda: ones().tril() & ones().triu(-3), "causal, window 4"),
    "tril_of_triu": (lambda: ones().triu(-3).tril(), "causal, window 4"),
    "tril_minus_tril": (lambda: ones().tril() & ~ones().tril(-4), "causal, window 4"),
    "not_or": (lambda: ~((indices()[1] > indices()[0]) | (indices()[1] <= indices()[0] - 4)), "causal, window 4"),
    "added": (lambda: torch.full((S, S), MIN).triu(1) + torch.full((S, S), MIN).tril(-4), "causal, window 4"),
    "abs": (lambda: (indices()[0] - indices()[1]).abs() <= 3, "window 3 left, 3 right"),
    "abs_lt": (lambda: torch.abs(indices()[1] - indices()[0]) < 3, "window 2 left, 2 right"),
    "not_abs_gt": (lambda: ~((indices()[1] - indices()[0]).abs() > 3), "window 3 left, 3 right"),
    "both_sides": (
        lambda: (indices()[1] <= indices()[0] + 1) & (indices()[1] >= indices()[0] - 3), "window 3 left, 1 right"
    ),
    "abs_and_causal": (
        lambda: ((indices()[0] - indices()[1]).abs() <= 3) & (indices()[1] <= indices()[0]), "causal, window 4"
    ),
    "two_windows": (lambda: window(7) & window(4), "causal, window 4"),
}  # fmt: skip


@pytest.mark.parametrize(("make_mask", "words"), WINDOWS.values(), ids=WINDOWS)
def test_window(make_mask, words):
    check(make_mask, words=words)


@pytest.mark.parametrize("gap", [1, 3])
def test_empty_band_gives_zeros(gap):
    def make_mask():
        q, k = indices()
        return (k <= q - gap) & (k > q - 1)

    check(make_mask, words=f"causal, window {1 - gap}", rows=torch.zeros(S, dtype=torch.bool))


@pytest.mark.parametrize("seqlen_q", [1, 3, S], ids=["decode", "append", "prefill"])
def test_window_with_offset(seqlen_q):
    def make_mask():
        q, k = indices(seqlen_q, S)
        q = q + (S - seqlen_q)
        return (k <= q) & (k > q - 4)

    check(make_mask, words="causal, window 4", seqlen_q=seqlen_q)


def padding(kind, dtype=torch.bool):
    mask = torch.ones(B, S)
    if kind == "left":
        mask[0, :5] = 0
    elif kind == "right":
        mask[1, 7:] = 0
    elif kind == "holes":
        mask[0, 2:4] = 0
        mask[1, ::3] = 0
    elif kind == "whole_row":
        mask[1] = 0
    return mask.to(dtype)


def causal_rows(mask):
    """Rows with a visible key under causal and padding, ``[batch, 1, seqlen]``."""
    return mask.bool().cumsum(-1).gt(0)[:, None]


PADDINGS = {
    "getitem": lambda m: m[:, None, None, :],
    "unsqueeze": lambda m: m.unsqueeze(1).unsqueeze(2),
    "view": lambda m: m.view(B, 1, 1, S),
    "expand": lambda m: m[:, None, None, :].expand(B, 1, S, S),
    "gather": lambda m: m[torch.arange(B)[:, None, None, None], torch.arange(S)[None, None, None, :]],
}


@pytest.mark.parametrize(("broadcast", "kind"), in_turn(PADDINGS, ["left", "right", "holes", "whole_row"]))
def test_padding(broadcast, kind):
    mask = padding(kind)
    check(broadcast, mask, words="padding", rows=mask.any(-1)[:, None, None])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32], ids=str)
def test_padding_dtype(dtype):
    mask = padding("holes", dtype)
    check(lambda m: m.to(torch.bool)[:, None, None, :], mask, words="padding")


def test_values_other_than_one_are_real_keys():
    mask = padding("left", torch.int64) * 7
    check(lambda m: m[:, None, None, :].bool(), mask, words="padding")


PADDING_AS_BIAS = {
    "fill_of_not": lambda m: torch.zeros(B, 1, 1, S).masked_fill(~m[:, None, None, :], MIN),
    "fill_of_zero": lambda m: torch.zeros(B, 1, 1, S).masked_fill(m[:, None, None, :] == 0, -torch.inf),
    "where": lambda m: torch.where(m[:, None, None, :], 0.0, MIN),
    "one_minus_bool": lambda m: (1.0 - m[:, None, None, :].to(torch.float32)) * MIN,
    "not_times_min": lambda m: (~m[:, None, None, :]) * MIN,
}


@pytest.mark.parametrize("make_mask", PADDING_AS_BIAS.values(), ids=PADDING_AS_BIAS)
def test_padding_as_bias(make_mask):
    check(make_mask, padding("left"), words="padding")


def test_one_minus_integers_is_a_bias():
    """(1 - m) * min excludes only where m is 0 or 1: an integer mask may hold other values."""
    mask = padding("left", torch.int64)
    check(lambda m: (1.0 - m[:, None, None, :]) * MIN, mask, words="streamed bias [2, 1, 1, 12]")


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@pytest.mark.parametrize("width", [None, 4], ids=["causal", "window"])
def test_causal_and_padding(kind, width):
    mask = padding(kind)

    def make_mask(m):
        return window(width or S) & m[:, None, None, :]

    visible = make_mask(mask).any(-1)
    words = f"causal, window {width or S}, padding"
    check(make_mask, mask, words=words, rows=visible)


def test_causal_bias_plus_padding_bias():
    """Two biases of finfo.min add up to -inf where both exclude."""
    mask = padding("left")

    def make_mask(m):
        causal = torch.full((S, S), MIN).triu(1)
        return causal[None, None] + (~m[:, None, None, :]) * MIN

    check(make_mask, mask, words="causal, padding", rows=causal_rows(mask))


def test_padding_of_a_longer_mask():
    """A cache's mask may be longer than K: its columns from a known one on are K's."""
    mask = torch.ones(B, 20, dtype=torch.bool)
    mask[0, :6] = False
    check(lambda m: m[:, 3 : 3 + S][:, None, None, :], mask, words="padding")


def test_padding_of_the_last_columns():
    mask = torch.ones(B, 20, dtype=torch.bool)
    mask[0, 8:11] = False
    check(lambda m: m[:, -S:][:, None, None, :], mask, words="padding")


def test_padding_read_at_negative_positions_wraps():
    mask = padding("holes")
    check_rewrite(lambda q, k, v, m: attend(q, k, v, m[:, torch.arange(S) - 3][:, None, None, :]), *qkv(), mask)


def test_padding_reversed_is_streamed():
    mask = padding("left")
    recording = check_rewrite(lambda q, k, v, m: attend(q, k, v, m.flip(1)[:, None, None, :]), *qkv(), mask)
    assert recording.masks in (["padding"], ["streamed mask [2, 1, 1, 12]"])


def test_query_padding_is_streamed_not_dropped():
    """A mask over the query rows hides whole rows; it is no key padding."""
    mask = padding("left")
    check(lambda m: m[:, None, :, None], mask, words="streamed mask [2, 1, 12, 1]", rows=mask[:, None])


def test_float_mask_rounded_to_integers_keeps_its_zeros():
    """0.5 becomes 0 in an integer cast: the key is hidden although the float is not zero."""
    mask = torch.full((B, S), 1.0)
    mask[0, :4] = 0.5
    check_rewrite(lambda q, k, v, m: attend(q, k, v, m.long().bool()[:, None, None, :]), *qkv(), mask)


def test_padding_of_one_sequence_for_all():
    mask = padding("left")[:1]
    check(lambda m: m[:, None, None, :], mask, words="padding")


def test_padding_of_one_dimension():
    mask = padding("left")[0]
    check(lambda m: m[None, :], mask, words="padding")


def test_conjunction_of_two_paddings():
    check(lambda a, b: a[:, None, None, :] & b[:, None, None, :], padding("left"), padding("right"), words="padding")


BIASES = {
    "full": lambda: torch.randn(B, H, S, S),
    "per_head": lambda: torch.randn(1, H, S, S),
    "per_column": lambda: torch.randn(H, 1, S),
    "one_matrix": lambda: torch.randn(S, S),
}


@pytest.mark.parametrize("make_bias", BIASES.values(), ids=BIASES)
def test_bias_is_streamed(make_bias):
    bias = make_bias()
    check(lambda b: b, bias, words=f"streamed bias {list(bias.shape)}")


def test_bias_next_to_a_causal_mask_keeps_the_band():
    def function(q, k, v, bias):
        scores = q @ k.transpose(-1, -2) * 0.25 + bias
        return (scores + torch.full((S, S), MIN).triu(1)).softmax(dim=-1) @ v

    recording = check_rewrite(function, *qkv(), torch.randn(H, S, S))
    assert recording.masks == ["causal, streamed bias [4, 12, 12]"]


def test_bias_before_the_scale_is_scaled():
    def function(q, k, v, bias):
        return ((q @ k.transpose(-1, -2) + bias) * 0.25).softmax(dim=-1) @ v

    assert check_rewrite(function, *qkv(), torch.randn(S, S)).masks == ["streamed bias [12, 12]"]


def test_a_second_product_is_a_bias():
    """DeBERTa and SAM add products of positions to q k^T."""

    def function(q, k, v, positions):
        return (q @ k.transpose(-1, -2) * 0.25 + q @ positions.transpose(-1, -2)).softmax(dim=-1) @ v

    recording = check_rewrite(function, *qkv(), torch.randn(H, S, D))
    assert recording.masks == ["streamed bias [2, 4, 12, 12]"]


def test_two_biases():
    def function(q, k, v, a, b):
        return (q @ k.transpose(-1, -2) + a + b).softmax(dim=-1) @ v

    recording = check_rewrite(function, *qkv(), torch.randn(S, S), torch.randn(B, 1, 1, S))
    assert recording.masks == ["streamed bias [2, 1, 1, 12], streamed bias [12, 12]"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_bias_on_half_precision_scores(dtype):
    """MPT: the scores become float32 by promotion, so the bias must not be rounded to the model's dtype."""

    def function(q, k, v, bias):
        return ((q @ k.transpose(-1, -2) * 0.25) + bias).softmax(dim=-1).to(q.dtype) @ v

    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    bias = -slopes * (torch.arange(S)[:, None] - torch.arange(S)).abs() * 3.3 - 100.0
    assert check_rewrite(function, *qkv(dtype=dtype), bias).masks == ["streamed bias [4, 12, 12]"]


OPAQUE = {
    "bool_full": torch.rand(B, H, S, S) > 0.4,
    "bool_per_batch": torch.rand(B, 1, S, S) > 0.4,
    "bool_matrix": torch.rand(S, S) > 0.4,
    "inf": torch.zeros(B, 1, S, S).masked_fill(torch.rand(B, 1, S, S) > 0.6, -torch.inf),
    "min": torch.zeros(B, 1, S, S).masked_fill(torch.rand(B, 1, S, S) > 0.6, MIN),
}


@pytest.mark.parametrize("mask", OPAQUE.values(), ids=OPAQUE)
def test_opaque_mask(mask):
    hidden = ~mask if mask.dtype == torch.bool else mask < -1
    kind = "mask" if mask.dtype == torch.bool else "bias"
    words = f"streamed {kind} {list(mask.shape)}"
    check(lambda m: m, mask, words=words, rows=~hidden.all(-1))


def test_opaque_bool_with_lifted_causal():
    mask = torch.rand(B, 1, S, S) > 0.3
    rows = (mask & torch.ones(S, S, dtype=torch.bool).tril()).any(-1)
    recording = check_rewrite(
        lambda q, k, v, m: attend(q, k, v, m & torch.ones(S, S, dtype=torch.bool).tril()), *qkv(), mask, rows=rows
    )
    assert recording.masks[0].startswith("causal, streamed mask")


def test_opaque_bool_and_bias_together():
    mask = torch.rand(B, 1, S, S) > 0.3

    def function(q, k, v, m, bias):
        scores = (q @ k.transpose(-1, -2) + bias).masked_fill(~m, -torch.inf)
        return scores.softmax(dim=-1) @ v

    check_rewrite(function, *qkv(), mask, torch.randn(H, S, S), rows=mask.any(-1))


DISJUNCTIONS = {
    "two_bands": lambda: window(3) | (indices()[1] == 0),
    "every_second": lambda: (indices()[1] <= indices()[0]) & ((indices()[0] - indices()[1]) % 2 == 0),
    "doubled": lambda: indices()[1] * 2 <= indices()[0],
    "xor": lambda: (indices()[1] <= indices()[0]) ^ (indices()[1] < 3),
}


@pytest.mark.parametrize("make_mask", DISJUNCTIONS.values(), ids=DISJUNCTIONS)
def test_what_is_no_conjunction_of_terms_is_streamed(make_mask):
    rows = make_mask().any(-1)
    recording = check_rewrite(lambda q, k, v: attend(q, k, v, make_mask()), *qkv(), rows=rows)
    assert "streamed" in recording.masks[0]


NOT_EXCLUDING = {
    "swin_-100": lambda: torch.full((S, S), -100.0).triu(1),
    "bert_-10000": lambda: torch.full((S, S), -10000.0).triu(1),
    "zero": lambda: torch.zeros(S, S).triu(1),
    "plus_inf_free": lambda: torch.full((S, S), 3.0).triu(1),
}


@pytest.mark.parametrize("make_mask", NOT_EXCLUDING.values(), ids=NOT_EXCLUDING)
def test_other_constants_are_a_bias(make_mask):
    recording = check_rewrite(lambda q, k, v: attend(q, k, v, make_mask()), *qkv())
    assert "causal" not in recording.masks[0]


def test_minus_10000_on_every_key_is_only_a_shift():
    mask = torch.full((B, 1, 1, S), -10000.0)
    mask[0, ..., :4] = 0.0
    check(lambda m: m, mask, words="streamed bias [2, 1, 1, 12]")


def test_masks_of_two_kinds_for_two_layers():
    """Gemma: a global and a sliding mask, each built once and used by many layers."""

    def layers(x, padding):
        q, k = indices()
        causal = (k <= q)[None, None] & padding[:, None, None, :]
        sliding = causal & (k > q - 4)
        for mask in (causal, sliding, causal, sliding):
            x = attend(x, x, x, torch.where(mask, 0.0, MIN))
        return x

    mask = torch.ones(B, S, dtype=torch.bool)
    mask[1, 5] = False
    recording = check_rewrite(layers, torch.randn(B, H, S, D), mask)
    assert recording.masks == ["causal, padding", "causal, window 4, padding"] * 2
    assert recording.square_nodes(S, S) == []


def test_lifted_mask_that_is_also_an_output_stays():
    def function(q, k, v):
        mask = torch.full((S, S), -1e9).triu(1)
        return torch.cat([attend(q, k, v, mask), mask.expand(B, H, S, S)], dim=-1)

    recording = check_rewrite(function, *qkv())
    assert recording.masks == ["causal"]


def test_dynamic_shapes_causal_and_padding():
    def function(q, k, v, m):
        rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        return attend(q, k, v, (keys <= rows)[None, None] & m[:, None, None, :])

    mask = padding("left")
    recording = check_rewrite(function, *qkv(), mask, rows=causal_rows(mask), dynamic=True)
    assert recording.masks == ["causal, padding"]
    assert recording.square_nodes(S, S) == []
