"""What a mask value means: which constants exclude a key, and the visibility of a call's terms in torch.

Models write "excluded" as -inf, as ``finfo(dtype).min`` of any float dtype, or as some number near -1e9; all of
these remove the key. Every other value (Swin's -100, BERT's -10000) is a bias and is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnpatch.attention_call import AttentionCall, position_offset

EXCLUDE_AT_OR_BELOW = -9.9e8
"""Not -1e9 itself: bfloat16 rounds -1e9 to -998244352."""

FLOAT16_MIN = -65504.0
"""``finfo(float16).min``, the one dtype minimum above EXCLUDE_AT_OR_BELOW."""


SCALED_EXCLUDE_AT_OR_BELOW = -1e6
"""What an excluding constant must still be after the factor that scales scores and mask together."""


def is_excluding(value: float, factor: float = 1.0) -> bool:
    """Whether a masking constant, later multiplied by ``factor``, removes the key (True) or is a bias (False)."""
    excludes = value <= EXCLUDE_AT_OR_BELOW or value == FLOAT16_MIN
    return excludes and (factor == 1.0 or value * factor <= SCALED_EXCLUDE_AT_OR_BELOW)


def excluded(attn_mask: Tensor) -> Tensor:
    """Bool tensor of ``attn_mask``'s shape: True where a bool or additive mask removes the key."""
    if attn_mask.dtype == torch.bool:
        return ~attn_mask
    return (attn_mask <= EXCLUDE_AT_OR_BELOW) | (attn_mask == FLOAT16_MIN)


def key_bounds(mask: Tensor) -> Tensor:
    """``AttentionCall.key_bounds`` of a mask: the first and the last key that each row sees, and what lies between.

    Args:
        mask: bool (True = attend) or additive float, ``[b, h, q, k]``.

    Returns:
        int32 ``[b, h, q, 3]``; (-k, 0, 1) for a row that sees no key.
    """
    seqlen_k = mask.shape[3]
    if seqlen_k == 0:
        return mask.new_tensor((0, 0, 1), dtype=torch.int32).repeat(*mask.shape[:3], 1)
    unrepeated = without_repeats(mask)
    visible = ~excluded(unrepeated)
    plain = visible if mask.dtype == torch.bool else visible & (unrepeated == 0)
    some = visible.any(dim=-1)
    bits = visible.view(torch.uint8)  # argmax returns the first of equals
    first = bits.argmax(dim=-1).masked_fill(~some, seqlen_k)
    stop = (seqlen_k - bits.flip(-1).argmax(dim=-1)).masked_fill(~some, 0)
    count = plain.sum(dim=-1)
    bounds = torch.stack([-first, stop, count == (stop - first).clamp(min=0)], dim=-1)
    return bounds.to(torch.int32).expand(*mask.shape[:3], 3).contiguous()


def without_repeats(x: Tensor) -> Tensor:
    """The view of ``x`` with size 1 where its stride is 0; the keys' dimension, which is the last, stays."""
    return x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride()[:-1])]


def positions(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Indices of all rows and of all keys."""
    device = call.q.device
    return torch.arange(call.seqlen_q, device=device), torch.arange(call.seqlen_k, device=device)


def distance(call: AttentionCall, rows: Tensor, keys: Tensor) -> Tensor:
    """``j - (i + q_offset)`` for the given rows and keys: int64 ``[batch or 1, m, n]``."""
    return keys[None, None, :] - (rows[None, :, None] + position_offset(call.q_offset, keys.device))


def alibi_bias(call: AttentionCall, rows: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``alibi_slopes`` add to the scores: ``[batch or 1, num_heads, m, n]`` in ``dtype``."""
    assert call.alibi_slopes is not None
    slopes = call.alibi_slopes.to(dtype).reshape(-1, call.num_heads, 1, 1)
    return -slopes * distance(call, rows, keys).abs()[:, None].to(dtype)


def band(call: AttentionCall, rows: Tensor, keys: Tensor) -> Tensor:
    """Causal and window terms for the given rows and keys.

    Args:
        call: the attention call.
        rows: int64 ``[m]`` query row indices.
        keys: int64 ``[n]`` key indices.

    Returns:
        Bool ``[batch or 1, m, n]``, True = visible.
    """
    right = distance(call, rows, keys)
    visible = torch.ones_like(right, dtype=torch.bool)
    if call.window_left is not None:
        visible &= right >= -call.window_left
    if call.window_right is not None:
        visible &= right <= call.window_right
    return visible


def _in_bounds(key_bounds: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Which of ``keys`` the bounds leave to the given rows: bool ``[batch or 1, num_heads or 1, m or 1, n]``."""
    bounds = without_repeats(key_bounds)
    bounds = bounds if bounds.shape[2] == 1 else bounds[:, :, rows]
    return (keys >= -bounds[..., 0:1]) & (keys < bounds[..., 1:2])


def visible_tile(call: AttentionCall, rows: Tensor, keys: Tensor) -> Tensor | None:
    """Visibility of a tile from every term but ``attn_mask``, or None for all.

    Bool ``[batch or 1, num_heads or 1, m or 1, n]``; only bounds that differ between heads make it num_heads.
    """
    visible = band(call, rows, keys)[:, None] if call.is_banded else None
    if call.key_padding is not None:
        padding = call.key_padding[:, None, None, keys]
        visible = padding if visible is None else visible & padding
    if call.key_bounds is not None:
        bounded = _in_bounds(call.key_bounds, rows, keys)
        visible = bounded if visible is None else visible & bounded
    return visible
