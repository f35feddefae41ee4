"""Calls of scaled_dot_product_attention: every argument keeps its meaning."""

import pytest
import torch
import torch.nn.functional as F

from attnpatch.testing.recording import check_rewrite, record

B, H, S, D = 2, 4, 12, 16
sdpa = F.scaled_dot_product_attention


def qkv(seqlen_q=S, seqlen_k=S, num_kv_heads=H, head_dim_v=D, dtype=torch.float32):
    q, k = torch.randn(B, H, seqlen_q, D), torch.randn(B, num_kv_heads, seqlen_k, D)
    return q.to(dtype), k.to(dtype), torch.randn(B, num_kv_heads, seqlen_k, head_dim_v).to(dtype)


def check(function, *args, words, **kwargs):
    recording = check_rewrite(function, *args, **kwargs)
    assert (recording.reasons, recording.masks) == ([], [words])
    assert recording.named("scaled_dot_product_attention") == []
    return recording


SIZES = [(12, 12), (5, 12), (12, 5), (1, 12), (2, 12)]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SIZES, ids=str)
def test_is_causal_is_aligned_upper_left(seqlen_q, seqlen_k):
    """pytorch#108108: row 0 sees key 0 only, also when K is longer."""
    check(lambda q, k, v: sdpa(q, k, v, is_causal=True), *qkv(seqlen_q, seqlen_k), words="causal")


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SIZES, ids=str)
def test_no_mask(seqlen_q, seqlen_k):
    check(sdpa, *qkv(seqlen_q, seqlen_k), words="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype(dtype):
    check(sdpa, *qkv(dtype=dtype), words="none")


SCALES = {
    "default": None,
    "number": 0.05,
    "one": 1.0,
    "negative": -0.3,
    "zero": 0.0,
}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_scale(scale):
    check(lambda q, k, v: sdpa(q, k, v, scale=scale), *qkv(head_dim_v=24), words="none")


def test_default_scale_comes_from_the_width_of_q():
    check(sdpa, *qkv(head_dim_v=64), words="none")


def test_scale_as_symfloat():
    """pytorch#194444: the fusion was lost."""

    def function(q, k, v):
        return sdpa(q, k, v, scale=1.0 / q.shape[-1])

    check(function, *qkv(), words="none", dynamic=True)


def test_default_scale_with_a_symbolic_head_dim():
    check(sdpa, *qkv(), words="none", dynamic=True)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_enable_gqa(num_kv_heads):
    args = qkv(num_kv_heads=num_kv_heads)
    recording = check(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), *args, words="none")
    assert recording.sites[0].num_kv_heads == num_kv_heads


@pytest.mark.parametrize("is_causal", [False, True])
def test_repeat_and_bool_mask(is_causal):
    """What Hugging Face models send: repeat_kv, a materialised bool mask, a scale."""
    mask = torch.rand(B, 1, S, S) > 0.3
    mask[..., 0] = True

    def function(q, k, v, mask):
        k, v = (x[:, :, None].expand(B, 2, 2, S, D).reshape(B, H, S, D) for x in (k, v))
        if is_causal:
            return sdpa(q, k, v, is_causal=True, scale=0.3)
        return sdpa(q, k, v, attn_mask=mask, dropout_p=0.0, scale=0.3, is_causal=False)

    words = "causal" if is_causal else "streamed mask [2, 1, 12, 12]"
    recording = check(function, *qkv(num_kv_heads=2), mask, words=words)
    assert recording.sites[0].num_kv_heads == 2


MASKS = {
    "bool": lambda: torch.rand(B, 1, S, S) > 0.3,
    "bool_matrix": lambda: torch.rand(S, S) > 0.3,
    "bool_row": lambda: torch.rand(B, 1, 1, S) > 0.3,
    "float": lambda: torch.randn(B, H, S, S),
    "float_head": lambda: torch.randn(H, 1, S),
    "float_with_inf": lambda: torch.zeros(S, S).masked_fill(torch.rand(S, S) > 0.6, -torch.inf),
}


@pytest.mark.parametrize("make_mask", MASKS.values(), ids=MASKS)
def test_mask(make_mask):
    mask = make_mask()
    visible = mask if mask.dtype == torch.bool else mask > -1e30
    function = lambda q, k, v, m: sdpa(q, k, v, attn_mask=m)  # noqa: E731
    words = f"streamed {'mask' if mask.dtype == torch.bool else 'bias'} {list(mask.shape)}"
    check(function, *qkv(), mask, words=words, rows=visible.any(-1))


def test_mask_built_in_the_graph():
    def function(q, k, v, padding):
        rows, keys = torch.arange(S)[:, None], torch.arange(S)[None, :]
        mask = (keys <= rows)[None, None] & padding[:, None, None, :]
        return sdpa(q, k, v, attn_mask=mask)

    padding = torch.ones(B, S, dtype=torch.bool)
    padding[0, :4] = False
    rows = padding.cumsum(-1).gt(0)[:, None]
    recording = check(function, *qkv(), padding, words="causal, padding", rows=rows)
    assert recording.square_nodes(S, S) == []


def test_half_precision_with_a_float32_bias():
    check(
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m),
        *qkv(dtype=torch.bfloat16),
        torch.randn(B, 1, S, S) * 50,
        words="streamed bias [2, 1, 12, 12]",
    )


def test_row_without_a_key_is_zeros():
    """pytorch#103749."""
    mask = torch.ones(B, 1, S, S, dtype=torch.bool)
    mask[0, :, -1] = False
    rows = mask.any(-1)
    check(lambda q, k, v, m: sdpa(q, k, v, m), *qkv(), mask, words="streamed mask [2, 1, 12, 12]", rows=rows)


def test_three_dimensions():
    check(sdpa, *(torch.randn(B * H, S, D) for _ in range(3)), words="none")


def test_three_dimensions_causal():
    function = lambda q, k, v: sdpa(q, k, v, is_causal=True)  # noqa: E731
    check(function, *(torch.randn(B * H, S, D) for _ in range(3)), words="causal")


def test_expanded_keys():
    """pytorch#191937: stride-0 K/V with 33 keys."""

    def function(q, k, v, mask):
        return sdpa(q, k.expand(B, H, 33, D), v.expand(B, H, 33, D), attn_mask=mask)

    q, k, v = qkv(seqlen_k=33, num_kv_heads=1)
    recording = check(function, q, k, v, torch.rand(B, 1, S, 33) > 0.2, words="streamed mask [2, 1, 12, 33]")
    assert recording.sites[0].num_kv_heads == 1


@pytest.mark.parametrize("passed", ["keyword", "positional"])
def test_dropout_is_refused(passed):
    def function(q, k, v):
        return sdpa(q, k, v, dropout_p=0.1) if passed == "keyword" else sdpa(q, k, v, None, 0.1)

    recording = record(function, *qkv())
    assert len(recording.reasons) == 1
    assert "dropout_p=0.1 is active" in recording.reasons[0]
    assert recording.after == recording.before


def test_five_dimensions():
    """Every dimension between batch and rows is heads."""
    recording = check_rewrite(sdpa, *(torch.randn(2, 3, 4, S, D) for _ in range(3)))
    assert (recording.reasons, recording.sites[0].num_heads) == ([], 12)


def test_broadcast_batch_is_refused_or_right():
    recording = check_rewrite(sdpa, torch.randn(B, H, S, D), torch.randn(1, H, S, D), torch.randn(1, H, S, D))
    assert len(recording.sites) == 1
