"""One pass over a mask: per row the first and the last visible key, and whether all between are plainly visible.

One program owns BLOCK_R rows and walks the keys in blocks of BLOCK_K. Each lane keeps what it has seen of its keys,

    before = max (seqlen_k - j);   stop = max (j + 1);   count = number of plain keys        over visible j

and the lanes meet at the end: first = seqlen_k - before, and a row is plain where count = stop - first.
"""

import triton
import triton.language as tl

from attnpatch.kernels.common.primitives import EXCLUDE_AT_OR_BELOW, FLOAT16_MIN


@triton.jit
def _visible_and_plain(tile):
    """What a tile of a mask does not exclude, and where it adds nothing either."""
    if tile.dtype == tl.int1:
        return tile, tile
    bias = tile.to(tl.float32)
    return (bias > EXCLUDE_AT_OR_BELOW) & (bias != FLOAT16_MIN), bias == 0.0


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "num_rows"])
def _key_bounds_kernel(
    mask,  # bool or additive [batch, num_heads, seqlen_q, seqlen_k]
    bounds,  # int32 [batch, num_heads, seqlen_q, 3], contiguous
    strides,
    num_heads,
    seqlen_q,
    num_rows,
    seqlen_k,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Bounds of BLOCK_R rows of the mask; batch, heads and queries are one dimension of num_rows."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    exists = rows < num_rows
    b, h, m = rows // seqlen_q // num_heads, rows // seqlen_q % num_heads, rows % seqlen_q
    b, h, m = b.to(tl.int64), h.to(tl.int64), m.to(tl.int64)
    row_pointers = mask + b * strides[0] + h * strides[1] + m * strides[2]

    before = tl.zeros([BLOCK_R, BLOCK_K], tl.int32)
    stop = tl.zeros([BLOCK_R, BLOCK_K], tl.int32)
    count = tl.zeros([BLOCK_R, BLOCK_K], tl.int32)
    for n in tl.range(0, seqlen_k, BLOCK_K):
        keys = n + tl.arange(0, BLOCK_K)
        pointers = row_pointers[:, None] + keys.to(tl.int64)[None, :] * strides[3]
        inside = exists[:, None] & (keys < seqlen_k)[None, :]
        tile = tl.load(pointers, mask=inside, other=0)
        visible, plain = _visible_and_plain(tile)
        visible = visible & inside
        before = tl.maximum(before, tl.where(visible, (seqlen_k - keys)[None, :], 0))
        stop = tl.maximum(stop, tl.where(visible, (keys + 1)[None, :], 0))
        count += (plain & inside).to(tl.int32)

    first = seqlen_k - tl.max(before, axis=1)
    last = tl.max(stop, axis=1)
    between = tl.maximum(last - first, 0)
    out = bounds + rows.to(tl.int64) * 3
    tl.store(out, -first, mask=exists)
    tl.store(out + 1, last, mask=exists)
    tl.store(out + 2, (tl.sum(count, axis=1) == between).to(tl.int32), mask=exists)
