"""Repeats of K/V heads in every spelling: undone where heads are interleaved, left where they are not."""

import pytest
import torch
import torch.nn.functional as F

from attnpatch.testing.recording import check_rewrite
from tests.combinations import in_turn

B, H, HKV, S, D = 2, 6, 2, 12, 16
N = H // HKV


def qkv(num_kv_heads=HKV, seqlen_q=S, seqlen_k=S):
    return (
        torch.randn(B, H, seqlen_q, D),
        torch.randn(B, num_kv_heads, seqlen_k, D),
        torch.randn(B, num_kv_heads, seqlen_k, D),
    )


def eager(q, k, v):
    return (q @ k.transpose(-1, -2) * 0.25).softmax(dim=-1) @ v


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def check(repeat, attend, args, num_kv_heads, **kwargs):
    recording = check_rewrite(lambda q, k, v: attend(q, repeat(k), repeat(v)), *args, **kwargs)
    assert [(s.reason, s.num_heads, s.num_kv_heads) for s in recording.sites] == [("", H, num_kv_heads)]
    return recording


INTERLEAVED = {
    "expand_reshape": lambda x: x[:, :, None, :, :].expand(B, HKV, N, S, D).reshape(B, H, S, D),
    "ellipsis": lambda x: x[:, :, None, ...].expand(-1, -1, N, -1, -1).reshape(B, H, S, D),
    "short_index": lambda x: x[:, :, None].expand(B, HKV, N, S, D).reshape(B, H, S, D),
    "unsqueeze": lambda x: x.unsqueeze(2).expand(B, HKV, N, S, D).flatten(1, 2),
    "unsqueeze_negative": lambda x: x.unsqueeze(-3).expand(B, HKV, N, S, D).reshape(B, H, S, D),
    "broadcast_to": lambda x: torch.broadcast_to(x[:, :, None], (B, HKV, N, S, D)).reshape(B, H, S, D),
    "broadcast_to_flatten": lambda x: x.unsqueeze(2).broadcast_to(B, HKV, N, S, D).flatten(1, 2),
    "repeat_flatten": lambda x: x[:, :, None].repeat(1, 1, N, 1, 1).flatten(1, 2),
    "repeat_view": lambda x: x.unsqueeze(2).repeat(1, 1, N, 1, 1).view(B, H, S, D),
    "repeat_interleave": lambda x: x.repeat_interleave(N, dim=1),
    "repeat_interleave_function": lambda x: torch.repeat_interleave(x, N, 1),
    "repeat_interleave_negative": lambda x: torch.repeat_interleave(x, repeats=N, dim=-3),
}


@pytest.mark.parametrize(("repeat", "attend"), in_turn(INTERLEAVED, [eager, sdpa]))
def test_interleaved(repeat, attend):
    recording = check(repeat, attend, qkv(), HKV)
    assert recording.named("repeat_interleave", "repeat", "expand", "broadcast_to", "reshape", "flatten") == []


@pytest.mark.parametrize("attend", [eager, sdpa])
def test_dynamic_shapes(attend):
    def repeat(x):
        b, h, s, d = x.shape
        return x[:, :, None, :, :].expand(b, h, N, s, d).reshape(b, h * N, s, d)

    recording = check_rewrite(lambda q, k, v: attend(q, repeat(k), repeat(v)), *qkv(seqlen_q=5), dynamic=True)
    assert recording.reasons == []
    assert recording.named("expand", "reshape") == []


ONE_HEAD = {
    "expand": lambda x: x.expand(B, H, S, D),
    "expand_minus_one": lambda x: x.expand(-1, H, -1, -1),
    "repeat": lambda x: x.repeat(1, H, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(H, 1),
    "broadcasting": lambda x: x,
}


@pytest.mark.parametrize(("repeat", "attend"), in_turn(ONE_HEAD, [eager, sdpa]))
def test_multi_query(repeat, attend):
    check(repeat, attend, qkv(num_kv_heads=1), 1)


OTHER_ORDERS = {
    "tiled": lambda x: x.repeat(1, N, 1, 1),
    "cat": lambda x: torch.cat([x] * N, dim=1),
    "group_first": lambda x: x[:, None].expand(B, N, HKV, S, D).reshape(B, H, S, D),
    "group_last": lambda x: x.transpose(1, 2).repeat(1, 1, N, 1).transpose(1, 2),
}


@pytest.mark.parametrize(("repeat", "attend"), in_turn(OTHER_ORDERS, [eager, sdpa]))
def test_tiled_orders(repeat, attend):
    """A tiled repeat gives head h the keys of h % num_kv_heads: the heads of q are reordered."""
    check(repeat, attend, qkv(), HKV)


@pytest.mark.parametrize("attend", [eager, sdpa])
def test_indexed_heads_stay(attend):
    check(lambda x: x[:, [0, 1, 0, 1, 0, 1]], attend, qkv(), H)


def test_order_of_equal_sizes_is_not_confused():
    """With as many groups as kv heads, both orders have the same shapes, and other heads of q read each head of k."""
    args = torch.randn(B, 4, S, D), torch.randn(B, 2, S, D), torch.randn(B, 2, S, D)
    for spread in (lambda x: x[:, :, None], lambda x: x[:, None]):
        recording = check_rewrite(
            lambda q, k, v, spread=spread: eager(
                q, *(spread(x).expand(B, 2, 2, S, D).reshape(B, 4, S, D) for x in (k, v))
            ),
            *args,
        )
        assert recording.sites[0].num_kv_heads == 2


def test_keys_repeated_and_values_not():
    q, k, _ = qkv()
    recording = check_rewrite(
        lambda q, k, v: eager(q, INTERLEAVED["repeat_interleave"](k), v), q, k, torch.randn(B, H, S, D)
    )
    assert recording.sites[0].num_kv_heads == H


def test_keys_tiled_and_values_interleaved():
    def function(q, k, v):
        return eager(q, k.repeat(1, N, 1, 1), v.repeat_interleave(N, dim=1))

    assert check_rewrite(function, *qkv()).sites[0].num_kv_heads == H


def test_repeat_of_the_sequence_is_no_head_repeat():
    """The same total size, but the copies lie along the keys."""

    def function(q, k, v):
        k, v = (x[:, :, :, None].expand(B, H, S, 2, D).reshape(B, H, 2 * S, D) for x in (k, v))
        return eager(q, k, v)

    assert check_rewrite(function, *qkv(num_kv_heads=H)).sites[0].num_kv_heads == H


def test_interleave_by_a_tensor_of_repeats():
    def function(q, k, v, repeats):
        return eager(q, *(torch.repeat_interleave(x, repeats, dim=1, output_size=H) for x in (k, v)))

    check_rewrite(function, *qkv(), torch.tensor([4, 2]))


@pytest.mark.parametrize("attend", [eager, sdpa])
def test_repeat_after_the_cache(attend):
    """The usual order: the cache holds HKV heads."""

    def function(q, k, v, past_k, past_v):
        k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        return attend(q, k.repeat_interleave(N, 1), v.repeat_interleave(N, 1))

    past = (torch.randn(B, HKV, 5, D) for _ in range(2))
    recording = check_rewrite(function, *qkv(seqlen_q=1, seqlen_k=1), *past)
    assert recording.sites[0].num_kv_heads == HKV


@pytest.mark.parametrize("attend", [eager, sdpa])
def test_repeat_before_the_cache(attend):
    """Falcon: the cache holds repeated heads, which cannot be told to be equal."""

    def function(q, k, v, past_k, past_v):
        k, v = (INTERLEAVED["repeat_interleave"](x) for x in (k, v))
        return attend(q, torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2))

    past = (torch.randn(B, H, 5, D) for _ in range(2))
    recording = check_rewrite(function, *qkv(seqlen_q=1, seqlen_k=1), *past)
    assert recording.sites[0].num_kv_heads == H


def test_first_update_of_a_dynamic_cache():
    """cat([torch.tensor([]), k]) copies nothing that matters, and hides no repeat above it."""

    def function(q, k, v):
        empty = torch.tensor([])
        k, v = (torch.cat([empty, x], dim=-2) for x in (k, v))
        return eager(q, *(x[:, :, None].expand(B, HKV, N, S, D).reshape(B, H, S, D) for x in (k, v)))

    recording = check_rewrite(function, *qkv())
    assert recording.sites[0].num_kv_heads == HKV
    assert recording.named("cat") == []


def test_repeated_keys_that_are_also_returned_stay():
    def function(q, k, v):
        k, v = k.repeat_interleave(N, 1), v.repeat_interleave(N, 1)
        return torch.cat([eager(q, k, v), k, v], dim=-1)

    recording = check_rewrite(function, *qkv())
    assert recording.sites[0].num_kv_heads == HKV
    assert len(recording.named("repeat_interleave")) == 2


def test_keys_copied_and_cast_before_the_repeat():
    """Upcasts and copies around the repeat are looked through in half precision."""

    def function(q, k, v):
        k = k.contiguous().float().repeat_interleave(N, 1)
        scores = q.float() @ k.transpose(-1, -2) * 0.25
        return scores.softmax(-1).to(v.dtype) @ v.repeat_interleave(N, 1)

    recording = check_rewrite(function, *(x.bfloat16() for x in qkv()))
    assert (recording.sites[0].num_kv_heads, recording.sites[0].dtype) == (HKV, "bfloat16")


COPIES = {
    "repeat": lambda x: x.repeat_interleave(N, 1),
    "expand": INTERLEAVED["unsqueeze"],
    "layout": lambda x: x.repeat_interleave(N, 1).transpose(1, 2).contiguous().transpose(1, 2),
    "factor": lambda x: x.repeat_interleave(N, 1) * 0.5,
}


@pytest.mark.parametrize(("copy", "attend"), in_turn(COPIES, [eager, sdpa]))
def test_a_write_into_a_copy_is_not_lost(copy, attend):
    """What a copy was made of is not what it holds once it is written."""

    def written(x):
        x = copy(x)
        x[:, :, -1] = 3.0
        return x

    check(written, attend, qkv(), H)


@pytest.mark.parametrize("attend", [eager, sdpa])
def test_a_write_through_a_view_of_k_and_v(attend):
    """A view holds what is written to what it is a view of: it is looked through."""

    def written(x):
        view = x.transpose(1, 2).transpose(1, 2)
        x[:, :, -1] = 3.0
        return view.repeat_interleave(N, 1)

    check(written, attend, qkv(), HKV)
