"""Which program does what, decided on the device from the lengths. Device code.

A batch whose sequences are alike is cut the same way everywhere: ``num_splits`` programs per tile of rows.

Where lengths differ (an offset per sequence, packed sequences) all keys of all tiles, the work, are cut into shares of
equal size, about ``parts`` of them per KV head; a sequence gets as many splits as it has shares:

    work = sum_b tiles_b * keys_b;   share = work / parts;   splits_b = ceil(keys_b / share)

and a program finds its sequence by the running sum of tiles_b * splits_b. So a long sequence is read by many programs,
a short one by one, and a captured graph serves every mix of lengths. BLOCK_B > 0 says that lengths differ.
"""

import triton
import triton.language as tl

from attnpatch.kernels.common.primitives import load_offset
from attnpatch.kernels.decode.places import sequence_of


@triton.jit
def share_of(keys, parts, least_share, most_share, BLOCK_N: tl.constexpr):
    """Keys per part in whole blocks, between ``least_share`` and ``most_share``; equal limits fix it."""
    share = tl.cdiv(tl.cdiv(keys, tl.maximum(parts, 1)), BLOCK_N) * BLOCK_N
    return tl.minimum(tl.maximum(share, least_share), most_share)


@triton.jit
def _sequences(
    q_offset,
    offset_stride,
    cu_seqlens_q,
    cu_seqlens_k,
    batch,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    num_splits,
    parts,
    least_share,
    most_share,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Tiles and splits of every sequence, ``[BLOCK_B]`` each; both 0 for one without a row."""
    b = tl.arange(0, BLOCK_B)
    exists = tl.minimum(b, batch - 1)
    _, _, num_queries = sequence_of(cu_seqlens_q, exists, seqlen_q)
    _, _, num_keys = sequence_of(cu_seqlens_k, exists, seqlen_k)
    offset = load_offset(q_offset, offset_stride, exists)
    first = tl.zeros([BLOCK_B], tl.int32)
    stop = first + num_keys
    if window_left is not None:
        first = tl.maximum(offset - window_left, first)
    if window_right is not None:
        stop = tl.minimum(offset + num_queries + window_right, stop)
    keys = tl.maximum(stop - first, 0)
    tiles = tl.where(b < batch, tl.cdiv(first * 0 + num_queries * GROUP_SIZE, BLOCK_M), 0)
    work = tl.sum(tiles.to(tl.int64) * keys)
    share = share_of(work, parts, least_share, most_share, BLOCK_N)
    splits = tl.minimum(tl.maximum((keys + share - 1) // share, 1), num_splits).to(tl.int32)
    return tiles, tl.where(tiles > 0, splits, 0)


@triton.jit
def pick(values, b, BLOCK_B: tl.constexpr):
    """``values[b]``, 0 past the end."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_B) == b, values, 0))


@triton.jit
def plan_of_program(
    q_offset,
    offset_stride,
    cu_seqlens_q,
    cu_seqlens_k,
    batch,
    num_kv_heads,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    num_splits,
    parts,
    least_share,
    most_share,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Sequence, KV head, tile of rows, split, and splits of this program; a sequence past the last: nothing to do.

    Splits of a tile come first, then the tiles of a head, the last of which see most keys.
    """
    program = tl.program_id(0)
    if BLOCK_B == 0:
        tiles = tl.cdiv(seqlen_q * GROUP_SIZE, BLOCK_M)
        split = program % num_splits
        rank = program // num_splits
        tile = tiles - 1 - rank % tiles
        b, h_kv = rank // tiles // num_kv_heads, rank // tiles % num_kv_heads
        splits = num_splits
    else:
        every_tiles, every_splits = _sequences(
            *(q_offset, offset_stride, cu_seqlens_q, cu_seqlens_k, batch, seqlen_q, seqlen_k),
            *(window_left, window_right, num_splits, parts, least_share, most_share),
            *(GROUP_SIZE, BLOCK_M, BLOCK_N, BLOCK_B),
        )
        units = every_tiles * every_splits
        unit = program // num_kv_heads
        ends = tl.cumsum(units, 0)
        b, h_kv = tl.sum((ends <= unit).to(tl.int32)), program % num_kv_heads
        splits = tl.maximum(pick(every_splits, b, BLOCK_B), 1)
        rank = unit - pick(ends - units, b, BLOCK_B)
        tile = pick(every_tiles, b, BLOCK_B) - 1 - rank // splits
        split = rank % splits
    return b, h_kv, tile, split, splits


@triton.jit
def splits_of_row(
    b,
    row,
    q_offset,
    offset_stride,
    cu_seqlens_q,
    cu_seqlens_k,
    batch,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    num_splits,
    parts,
    least_share,
    most_share,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """How many splits wrote row ``row`` of batch index ``b``; 0 for a row of no sequence."""
    splits = num_splits
    if BLOCK_B > 0:
        _, every_splits = _sequences(
            *(q_offset, offset_stride, cu_seqlens_q, cu_seqlens_k, batch, seqlen_q, seqlen_k),
            *(window_left, window_right, num_splits, parts, least_share, most_share),
            *(GROUP_SIZE, BLOCK_M, BLOCK_N, BLOCK_B),
        )
        if cu_seqlens_q is not None:
            sequences = tl.arange(0, BLOCK_B)
            stops = tl.load(cu_seqlens_q + 1 + tl.minimum(sequences, batch - 1))
            b = tl.sum(((sequences < batch) & (stops <= row)).to(tl.int32))
        splits = pick(every_splits, b, BLOCK_B)
    return splits
