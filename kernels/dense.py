"""Pages, quantised K and V and packed sequences in torch: their definition, and how plain backends run them.

pages        key j of sequence b is row j % page_size of page block_table[b, j // page_size]
quantised    k.float() * k_scale[..., None]
TBQ4 codes   attnpatch.tbq4.decode(k, k_scale, head_dim)
4 bits       integers * k_scale + k_shift, a group of channels each (:func:`integers`)
packed       one call of batch 1 per sequence
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnpatch.attention_call import PACKED, SCALES, AttentionCall, width_of, words_of_dtype
from attnpatch.tbq4 import decode
from attnpatch.tbq4.codec import unpack

Index = tuple[slice, slice, slice]
"""Batch, heads and rows of q, o and lse; or of K and V."""

ALL = slice(None)


def dense(call: AttentionCall, dtype: torch.dtype | None = None) -> AttentionCall:
    """``call`` with K and V neither in pages nor quantised; packed sequences stay so.

    Args:
        call: any call.
        dtype: of what was quantised; default that of q.
    """
    dtype = dtype or call.q.dtype
    sides = (call.k, call.k_scale, call.k_shift), (call.v, call.v_scale, call.v_shift)
    k, v = (_dense(*side, call.block_table, dtype) for side in sides)
    return call._replace(k=k, v=v, block_table=None, k_scale=None, v_scale=None, k_shift=None, v_shift=None)


def integers(x: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors ``[.., head_dim]`` in ``dtype`` of integers of 4 bits, see ``AttentionCall.k_shift``."""
    wide = torch.promote_types(dtype, torch.float32)
    groups = unpack(x).to(wide).unflatten(-1, (scale.shape[-1], -1))
    return (groups * scale.to(wide)[..., None] + shift.to(wide)[..., None]).flatten(-2).to(dtype)


def _dense(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, block_table: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if block_table is not None:
        x, scale, shift = (None if y is None else _gathered(y, block_table) for y in (x, scale, shift))  # type: ignore[assignment]
    if scale is None:
        return x
    if shift is not None:
        return integers(x, scale, shift, dtype)
    if x.dtype == PACKED:
        return decode(x, scale, width_of(x), dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (x.to(wide) * scale.to(wide)[..., None]).to(dtype)


def _gathered(pool: Tensor, block_table: Tensor) -> Tensor:
    """``[num_pages, num_kv_heads, page_size, ...]`` as ``[batch, num_kv_heads, num_blocks * page_size, ...]``."""
    return pool[block_table.long().clamp(0, pool.shape[0] - 1)].transpose(1, 2).flatten(2, 3)


def sequences(call: AttentionCall, dtype: torch.dtype | None = None) -> Iterator[tuple[Index, AttentionCall]]:
    """Each sequence's place in q, o and lse, and the sequence as a dense call of batch 1; ``dtype`` as in ``dense``.

    Reads cu_seqlens on the host: on a GPU that waits for the device.
    """
    for b in range(call.batch):
        place, part = sequence(call, b)
        yield place, dense(part, dtype)


def sequence(call: AttentionCall, b: int) -> tuple[Index, AttentionCall]:
    """The place of sequence ``b`` in q, o and lse, and a call of batch 1 on views of its part; pages stay pages."""
    rows = _place(call.cu_seqlens_q, b)
    keys = (ALL, ALL, ALL) if call.block_table is not None else _place(call.cu_seqlens_k, b)
    scales: dict[str, Any] = {n: None if x is None else x[keys] for n in SCALES for x in (getattr(call, n),)}
    one = slice(b, b + 1)
    mask, bounds, padding, table = (
        None if x is None else x[one] for x in (call.attn_mask, call.key_bounds, call.key_padding, call.block_table)
    )
    offset, slopes = call.q_offset, call.alibi_slopes
    if isinstance(offset, Tensor) and offset.dim() > 0:
        offset = offset.expand(call.batch)[one]
    return rows, call._replace(
        q=call.q[rows],
        k=call.k[keys],
        v=call.v[keys],
        attn_mask=mask,
        key_padding=padding,
        q_offset=offset,
        key_bounds=bounds,
        alibi_slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[one],
        lse=None if call.lse is None else call.lse[rows],
        block_table=table,
        **scales,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
    )


def _place(cu_seqlens: Tensor | None, b: int) -> Index:
    if cu_seqlens is None:
        return slice(b, b + 1), ALL, ALL
    start, stop = cu_seqlens[b : b + 2].tolist()
    return ALL, ALL, slice(start, stop)


def storage_refusal(call: AttentionCall, reader: str, packed: bool = False) -> str | None:
    """Why ``reader``, which takes K and V as they are, does not take ``call``; None if it does.

    Args:
        call: any call.
        reader: its name.
        packed: whether it takes packed sequences, too.
    """
    if call.block_table is not None:
        return f"K and V lie in pages of {call.page_size}, and {reader} follows no block_table"
    sides = ("K", call.k, call.k_scale, call.k_shift), ("V", call.v, call.v_scale, call.v_shift)
    for name, x, scale, shift in sides:
        if scale is not None:
            form = words_of_dtype(x.dtype, shift is not None)
            return f"{name} is {form}, and {reader} multiplies no scale in"
    if call.cu_seqlens_q is not None and not packed:
        return f"{call.batch} sequences are packed, and {reader} reads no cu_seqlens_q"
    return None
