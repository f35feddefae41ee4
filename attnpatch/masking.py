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


def is_excluding(value: float) -> bool:
    """Whether a masking constant removes the key (True) or is a bias (False)."""
    return value <= EXCLUDE_AT_OR_BELOW or value == FLOAT16_MIN


def excluded(attn_mask: Tensor) -> Tensor:
    """Bool tensor of ``attn_mask``'s shape: True where a bool or additive mask removes the key."""
    if attn_mask.dtype == torch.bool:
        return ~attn_mask
    return (attn_mask <= EXCLUDE_AT_OR_BELOW) | (attn_mask == FLOAT16_MIN)


def has_visibility_terms(call: AttentionCall) -> bool:
    """Whether any term other than ``attn_mask`` can hide a key."""
    return call.is_banded or call.key_padding is not None


def band(call: AttentionCall, rows: Tensor, keys: Tensor) -> Tensor:
    """Causal and window terms for the given rows and keys.

    Args:
        call: the attention call.
        rows: int64 ``[m]`` query row indices.
        keys: int64 ``[n]`` key indices.

    Returns:
        Bool ``[batch or 1, m, n]``, True = visible.
    """
    distance = keys[None, None, :] - (rows[None, :, None] + position_offset(call.q_offset, keys.device))
    visible = torch.ones_like(distance, dtype=torch.bool)
    if call.window_left is not None:
        visible &= distance >= -call.window_left
    if call.window_right is not None:
        visible &= distance <= call.window_right
    return visible


def visible_tile(call: AttentionCall, rows: Tensor, keys: Tensor) -> Tensor | None:
    """Visibility of a tile from every term but ``attn_mask``: bool ``[batch or 1, 1, m or 1, n]``, or None for all."""
    visible = band(call, rows, keys)[:, None] if call.is_banded else None
    if call.key_padding is not None:
        padding = call.key_padding[:, None, None, keys]
        visible = padding if visible is None else visible & padding
    return visible
