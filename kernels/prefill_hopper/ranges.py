"""What the rows of each tile see, from bounds per row: worked out once, for producer and consumers of all heads.

Device code.
"""

import triton
import triton.language as tl

from attnpatch.kernels.common.primitives import load_bounds, load_offset

FIELDS = 6
"""Of a tile: the row that those of the kernel's own stop before, which is 0 where it leaves the tile to another kernel;
lo, full_lo, full_hi, hi as in kernel.py; whether the rows leave no gap."""


@triton.jit(do_not_specialize=["q_offset", "num_heads", "seqlen_q", "seqlen_k", "window_left", "window_right"])
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
    HAS_MASKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Ranges of one tile. Beside masks, whoever reads bounds alone may compute it if all its rows are plain."""
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
    whole = tl.min(plain) != 0 if HAS_MASKS else True
    tl.store(found, tl.where(whole, seqlen_q, 0))
    tl.store(found + 1, tl.min(start))
    tl.store(found + 2, tl.max(start))
    tl.store(found + 3, tl.min(stop))
    tl.store(found + 4, tl.where(whole, tl.max(stop), 0))
    tl.store(found + 5, joined.to(tl.int32))
