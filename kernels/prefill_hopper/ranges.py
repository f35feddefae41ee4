"""What the rows of each tile see, from bounds per row: worked out once, for producer and consumers of all heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.common.primitives import load_bounds, load_offset
from attnpatch.kernels.common.support import offset_stride

FIELDS = 6
"""Of a tile: lo, full_lo, full_hi, hi as in kernel.py, whether all its rows are plain, whether they leave no gap."""


@triton.jit
def _ranges_kernel(
    key_bounds,  # int32 [batch, heads, seqlen_q, 3]
    bounds_strides,
    q_offset,
    offset_stride,
    ranges,  # int32 [batch, heads, blocks, FIELDS], contiguous
    num_heads,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Ranges of one tile."""
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    block, flat_head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, h = flat_head // num_heads, flat_head % num_heads
    rows = tl.minimum(block * BLOCK_M + tl.arange(0, BLOCK_M), seqlen_q - 1)
    position = rows + load_offset(q_offset, offset_stride, b)
    start, stop, plain = load_bounds(key_bounds, bounds_strides, b, h, rows)
    start, stop = tl.maximum(start, 0), tl.minimum(stop, seqlen_k)
    if window_left is not None:
        start = tl.maximum(start, position - window_left)
    if window_right is not None:
        stop = tl.minimum(stop, position + window_right + 1)
    stop = tl.maximum(stop, 0)
    see_themselves = tl.min(((start <= position) & (position < stop)).to(tl.int32)) != 0
    joined = (tl.max(start) <= tl.min(stop)) | see_themselves
    found = ranges + tl.program_id(0).to(tl.int64) * FIELDS
    tl.store(found, tl.min(start))
    tl.store(found + 1, tl.max(start))
    tl.store(found + 2, tl.min(stop))
    tl.store(found + 3, tl.max(stop))
    tl.store(found + 4, (tl.min(plain) != 0).to(tl.int32))
    tl.store(found + 5, joined.to(tl.int32))


def tile_ranges(call: AttentionCall, block_m: int) -> Tensor:
    """int32 ``[batch or 1, num_heads or 1, blocks, FIELDS]`` of a call with bounds."""
    assert call.key_bounds is not None
    bounds = call.key_bounds
    heads = call.num_heads if bounds.stride(1) else 1
    blocks = -(-call.seqlen_q // block_m)
    ranges = torch.empty(call.batch, heads, blocks, FIELDS, dtype=torch.int32, device=call.q.device)
    _ranges_kernel[(call.batch * heads * blocks,)](
        bounds,
        bounds.stride(),
        call.q_offset,
        offset_stride(call),
        ranges,
        heads,
        call.seqlen_q,
        call.seqlen_k,
        call.window_left,
        call.window_right,
        FIELDS=FIELDS,
        BLOCK_M=block_m,
        num_warps=4,
    )
    return ranges
