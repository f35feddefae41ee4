"""torch SDPA as it is fastest: ``is_causal`` where that is exact, else row blocks with a small mask each.

    causal, square, no other term   one call per query head of a group: sdpa(q[:, g::G], k, v, is_causal=True)
    anything else                   for each BLOCK_M rows: sdpa(q rows, k[low:high], v[low:high], mask tile)

K and V are never repeated: query head g of every group is a strided view, and a decode step packs a group's heads
as rows. A mask tile is at most BLOCK_M x seqlen_k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.dispatch import Backend
from attnpatch.kernels.bands import key_range
from attnpatch.masking import excluded, visible_tile

BLOCK_M = 256


def sdpa(call: AttentionCall) -> Tensor:
    """Run ``call`` through ``torch.nn.functional.scaled_dot_product_attention``."""
    if _is_plain_causal(call) or not _has_terms(call):
        return _whole(call)
    if call.seqlen_q == 1 and call.attn_mask is None:
        return _packed_decode(call)
    return _row_blocks(call)


def _has_terms(call: AttentionCall) -> bool:
    return call.is_banded or call.key_padding is not None or call.attn_mask is not None


def _is_plain_causal(call: AttentionCall) -> bool:
    """Whether ``is_causal=True``, which torch aligns upper-left, means exactly this call's mask."""
    causal = call.window_left is None and call.window_right == 0
    at_start = isinstance(call.q_offset, int) and call.q_offset == 0
    return causal and at_start and call.key_padding is None and call.attn_mask is None


def _group_heads(call: AttentionCall, g: int) -> slice:
    return slice(g, None, call.group_size)


def _whole(call: AttentionCall) -> Tensor:
    """No mask tensor at all: one call per head of the group."""
    if call.seqlen_q == 1 and not call.is_banded:
        return _packed_decode(call)
    o = call.empty_output()
    for g in range(call.group_size):
        heads = _group_heads(call, g)
        o[:, heads] = F.scaled_dot_product_attention(
            call.q[:, heads], call.k, call.v, is_causal=call.is_banded, scale=call.sm_scale
        )
    return o


def _packed_decode(call: AttentionCall) -> Tensor:
    """One query row: a group's heads become the rows of its KV head, and all of them share the mask."""
    low, high = key_range(call, 0, 0)
    q = call.q.reshape(call.batch, call.num_kv_heads, call.group_size, call.head_dim)
    k, v, mask = _key_slice(call, torch.zeros(1, dtype=torch.int64, device=q.device), low, high)
    o = call.empty_output()
    packed = _attend(q, k, v, mask, call.sm_scale)
    o.copy_(packed.reshape(o.shape))
    return o


def _row_blocks(call: AttentionCall) -> Tensor:
    o = call.empty_output()
    for start in range(0, call.seqlen_q, BLOCK_M):
        stop = min(start + BLOCK_M, call.seqlen_q)
        low, high = key_range(call, start, stop - 1)
        k, v, mask = _key_slice(call, torch.arange(start, stop, device=call.q.device), low, high)
        for g in range(call.group_size):
            heads = _group_heads(call, g)
            tile = _merge_masks(call, mask, heads, start, stop, low, high)
            o[:, heads, start:stop] = _attend(call.q[:, heads, start:stop], k, v, tile, call.sm_scale)
    return o


def _key_slice(call: AttentionCall, rows: Tensor, low: int, high: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """k, v of keys ``low..high`` with hidden values zeroed, and the tile's visibility or None."""
    k, v = call.k[:, :, low:high], call.v[:, :, low:high]
    visible = visible_tile(call, rows, torch.arange(low, high, device=call.q.device))
    if visible is None or bool(visible.all()):
        return k, v, None
    unused = ~visible.any(dim=2)[..., None]  # [batch or 1, 1, n, 1]
    if bool(unused.any()):  # an unwritten cache tail may hold NaN, and 0 * NaN is NaN
        k, v = k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)
    return k, v, visible


def _merge_masks(
    call: AttentionCall, visible: Tensor | None, heads: slice, start: int, stop: int, low: int, high: int
) -> Tensor | None:
    """The tile's visibility and its part of ``attn_mask`` as one SDPA mask."""
    if call.attn_mask is None:
        return visible
    tile = call.attn_mask[:, heads, start:stop, low:high]
    if tile.dtype == torch.bool:
        return tile if visible is None else tile & visible
    hidden = excluded(tile) if visible is None else excluded(tile) | ~visible
    if tile.dtype != call.q.dtype:  # a float32 bias must not be rounded to half precision
        tile = tile.to(torch.float64 if call.q.dtype == torch.float64 else torch.float32)
    return tile.masked_fill(hidden, -torch.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sm_scale: float) -> Tensor:
    """SDPA whose rows without a visible key are zeros on every torch backend."""
    if k.shape[2] == 0:
        return q.new_zeros((*q.shape[:-1], v.shape[-1]))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=sm_scale)
    if mask is None:
        return o
    hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
    return o.masked_fill(hidden.all(dim=-1, keepdim=True), 0.0)


def _refuses(call: AttentionCall) -> str | None:
    if call.softcap is not None:
        return f"softcap {call.softcap} has no place in torch's scaled_dot_product_attention"
    return None


BACKENDS = {
    "cpu.sdpa": Backend("cpu.sdpa", ("cpu",), _refuses, sdpa),
    "sdpa.blocked": Backend("sdpa.blocked", ("cuda",), _refuses, sdpa),
}
