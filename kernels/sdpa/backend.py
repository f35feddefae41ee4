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
from attnpatch.kernels.bands import key_range, without_idle_terms
from attnpatch.kernels.dense import storage_refusal
from attnpatch.masking import excluded, visible_tile

BLOCK_M = 256


def sdpa(call: AttentionCall) -> Tensor:
    """Run ``call`` through ``torch.nn.functional.scaled_dot_product_attention``.

    Reads ``key_padding``, ``key_bounds`` and a ``q_offset`` tensor on the host; on a GPU that waits for the device.
    """
    call = _simplified(call)
    if call.seqlen_q == 1:
        return _packed_decode(call)
    masked = call.key_padding is not None or call.attn_mask is not None or call.key_bounds is not None
    if not masked and (not call.is_banded or _is_causal(call)):
        return _whole(call)
    return _row_blocks(call)


def _simplified(call: AttentionCall) -> AttentionCall:
    """The call without terms that hide nothing, and with a single offset as a number."""
    call = without_idle_terms(call)
    if call.key_padding is not None and bool(call.key_padding.all()):
        call = call._replace(key_padding=None)
    if isinstance(call.q_offset, Tensor) and call.q_offset.numel() == 1:
        call = call._replace(q_offset=int(call.q_offset))
    return call


def _is_causal(call: AttentionCall) -> bool:
    """Whether ``is_causal=True``, which torch aligns upper-left, means exactly this call's band."""
    causal = call.window_left is None and call.window_right == 0
    return causal and isinstance(call.q_offset, int) and call.q_offset == 0


def _group_heads(call: AttentionCall, g: int) -> slice:
    return slice(g, None, call.group_size)


def _whole(call: AttentionCall) -> Tensor:
    """No mask tensor at all: one call per head of the group."""
    o = call.empty_output()
    for g in range(call.group_size):
        heads = _group_heads(call, g)
        o[:, heads] = F.scaled_dot_product_attention(
            call.q[:, heads], call.k, call.v, is_causal=call.is_banded, scale=call.sm_scale
        )
    return o


def _packed_decode(call: AttentionCall) -> Tensor:
    """One query row: a group's heads become the rows of its KV head."""
    low, high = key_range(call, 0, 0)
    heads = (call.num_kv_heads, call.group_size)
    if isinstance(call.q_offset, int):  # the band is exactly low..high
        call = call._replace(window_left=None, window_right=None)
    tile = None if call.attn_mask is None else call.attn_mask[..., low:high]
    mask = _merged(tile, _visible(call, 0, 1, low, high))
    if mask is not None and mask.shape[1] > 1:
        mask = mask.unflatten(1, heads)[..., 0, :]
    q = call.q.reshape(call.batch, *heads, call.head_dim)
    packed = _attend(q, call.k[:, :, low:high], call.v[:, :, low:high], mask, call.sm_scale)
    o = call.empty_output()
    return o.copy_(packed.reshape(o.shape))


def _row_blocks(call: AttentionCall) -> Tensor:
    o = call.empty_output()
    for start in range(0, call.seqlen_q, BLOCK_M):
        stop = min(start + BLOCK_M, call.seqlen_q)
        low, high = key_range(call, start, stop - 1)
        k, v = call.k[:, :, low:high], call.v[:, :, low:high]
        visible = _visible(call, start, stop, low, high)
        for g in range(call.group_size):
            heads = _group_heads(call, g)
            tile = None if call.attn_mask is None else call.attn_mask[:, heads, start:stop, low:high]
            seen = visible if visible is None or visible.shape[1] == 1 else visible[:, heads]
            rows = call.q[:, heads, start:stop]
            o[:, heads, start:stop] = _attend(rows, k, v, _merged(tile, seen), call.sm_scale)
    return o


def _visible(call: AttentionCall, start: int, stop: int, low: int, high: int) -> Tensor | None:
    """Visibility of keys ``low..high`` for rows ``start..stop``, or None when all are visible."""
    device = call.q.device
    visible = visible_tile(call, torch.arange(start, stop, device=device), torch.arange(low, high, device=device))
    return None if visible is None or bool(visible.all()) else visible


def _merged(tile: Tensor | None, visible: Tensor | None) -> Tensor | None:
    """A tile of ``attn_mask`` and the other terms' visibility as one SDPA mask."""
    if tile is None:
        return visible
    if tile.dtype == torch.bool:
        return tile if visible is None else tile & visible
    hidden = excluded(tile) if visible is None else excluded(tile) | ~visible
    if tile.dtype != torch.float64:  # a float32 bias must not be rounded to half precision
        tile = tile.float()
    return tile.masked_fill(hidden, -torch.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sm_scale: float) -> Tensor:
    """SDPA whose rows without a visible key are zeros, and whose hidden keys may hold NaN."""
    if k.shape[2] == 0:
        return q.new_zeros((*q.shape[:-1], v.shape[-1]))
    if mask is not None and mask.is_floating_point():
        mask = mask.to(torch.promote_types(q.dtype, torch.float32))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=sm_scale)
    if mask is None:
        return o
    hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
    if bool(o.isnan().any()):  # 0 * NaN from an unwritten cache tail: select, and run again
        unused = hidden.all(dim=2)[..., None]  # [batch or 1, heads or 1, n, 1]
        k, v = k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=sm_scale)
    return o.masked_fill(hidden.all(dim=-1, keepdim=True), 0.0)


def _refuses(call: AttentionCall) -> str | None:
    if call.batch_invariant:
        return "batch_invariant: torch's scaled_dot_product_attention chooses its blocks by the batch"
    if call.softcap is not None:
        return f"softcap {call.softcap} has no place in torch's scaled_dot_product_attention"
    if call.sinks is not None:
        return "sinks have no place in torch's scaled_dot_product_attention"
    if call.alibi_slopes is not None:
        return "alibi_slopes have no place in torch's scaled_dot_product_attention but as a bias of every score"
    if call.lse is not None:
        return "torch's scaled_dot_product_attention does not return the lse"
    if call.sm_scale <= 0:
        return f"sm_scale {call.sm_scale} is not positive: torch's is_causal path gives NaN"
    return storage_refusal(call, "torch's scaled_dot_product_attention")


BACKENDS = {
    "cpu.sdpa": Backend("cpu.sdpa", ("cpu",), _refuses, sdpa),
    "sdpa.blocked": Backend("sdpa.blocked", ("cuda",), _refuses, sdpa),
}
