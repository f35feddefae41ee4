"""Which program computes which tiles of packed sequences, whose lengths are on the device alone. Device code.

One kernel lists the query blocks of all sequences, one ranks them and deals tiles out, in the form of schedule.py:

    block  = cost << 48 | sequence << 32 | query block;   rank = how many blocks come before it, the longest first
    sections of heads, whose K and V fit L2 together, from the longest block to the shortest, the next one back

    place        0  1  2 .. P-1  P    P+1 ..
    program      0  1  2 .. P-1  P-1  P-2 ..  0  0  1 ..

Costs change slowly along that line, so that programs, which get their tiles to and fro, have as much to do: of 64
sequences of 16 to 4,096 tokens within 2 %.

The rows of no sequence, behind the last, are dealt out as those of one more, without keys.
"""

import triton
import triton.language as tl

from attnpatch.kernels.common.primitives import load_offset

NO_BLOCK = tl.constexpr(-1)
"""In the place of blocks that there might have been."""

COSTLIEST = tl.constexpr((1 << 15) - 1)
"""Blocks on more keys than that many key blocks are dealt as if they cost so much."""


@triton.jit
def _lengths(cu_seqlens, sequences, batch, total):
    """Rows of ``sequences``; those of no sequence belong to sequence ``batch``, and none to later ones."""
    first = tl.load(cu_seqlens + sequences, mask=sequences <= batch, other=total)
    return tl.load(cu_seqlens + sequences + 1, mask=sequences < batch, other=total) - first


@triton.jit
def _num_keys(cu_seqlens_k, b, batch, seqlen_k):
    """Keys of sequence ``b``."""
    keys = seqlen_k
    if cu_seqlens_k is not None:
        keys = _lengths(cu_seqlens_k, tl.minimum(b, batch - 1), batch, seqlen_k)
    return tl.where(b < batch, keys, 0)


@triton.jit
def _block(index, cu_seqlens_q, batch, seqlen_q, BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr):
    """Sequence and query block within it of one of all blocks, by the running sum of their number; rows of it."""
    b, before, end = 0, 0, 0
    for start in range(0, batch + 1, BLOCK_B):
        sequences = start + tl.arange(0, BLOCK_B)
        blocks = tl.cdiv(tl.maximum(_lengths(cu_seqlens_q, sequences, batch, seqlen_q), 0), BLOCK_M)
        passed = (end + tl.cumsum(blocks, 0) <= index) & (sequences <= batch)
        b += tl.sum(passed.to(tl.int32))
        before += tl.sum(tl.where(passed, blocks, 0))
        end += tl.sum(blocks)
    return b, index - before


@triton.jit
def _cost(m, offset, num_rows, num_keys, window_left, window_right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Key blocks of the tile at row ``m``: those of ``masks.seen_keys``."""
    lo, hi = 0, num_keys
    if window_left is not None:
        lo = tl.maximum(m + offset - window_left, 0)
    if window_right is not None:
        hi = tl.minimum(hi, tl.minimum(m + BLOCK_M, num_rows) + offset + window_right)
    return tl.maximum(tl.cdiv(tl.maximum(hi, 0), BLOCK_N) - lo // BLOCK_N, 1)


@triton.jit(
    do_not_specialize=["q_offset", "window_left", "window_right", "batch", "seqlen_q", "seqlen_k"],
)
def _blocks_kernel(
    cu_seqlens_q,  # int32 [batch + 1]
    cu_seqlens_k,  # likewise, or None
    q_offset,  # int, or a pointer read with offset_stride
    blocks,  # int64, one per program
    offset_stride,
    window_left,
    window_right,
    batch,
    seqlen_q,
    seqlen_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """List one block."""
    b, m_block = _block(tl.program_id(0), cu_seqlens_q, batch, seqlen_q, BLOCK_M, BLOCK_B)
    num_rows = _lengths(cu_seqlens_q, b, batch, seqlen_q)
    num_keys = _num_keys(cu_seqlens_k, b, batch, seqlen_k)
    offset = load_offset(q_offset, offset_stride, tl.minimum(b, batch - 1))
    cost = _cost(m_block * BLOCK_M, offset, num_rows, num_keys, window_left, window_right, BLOCK_M, BLOCK_N)
    cost = tl.minimum(cost, COSTLIEST).to(tl.int64)
    block = (cost << 48) | (b.to(tl.int64) << 32) | m_block
    tl.store(blocks + tl.program_id(0), tl.where(b <= batch, block, NO_BLOCK))


@triton.jit(do_not_specialize=["num_blocks", "num_heads", "section", "num_programs", "max_tiles"])
def _deal_kernel(
    blocks,  # int64 [num_blocks], of which some may be NO_BLOCK
    tiles,  # int64 [programs, max_tiles + 1]: sequence << 48 | head << 32 | query block
    num_tiles,  # int32 [programs]
    num_blocks,
    num_heads,
    section,  # heads that run side by side
    num_programs,
    max_tiles,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Deal out the tiles of one block, those of all heads; and count those of as many programs."""
    own = tl.load(blocks + tl.program_id(0))
    rank, real = 0, 0
    for start in range(0, num_blocks, BLOCK):
        others = start + tl.arange(0, BLOCK)
        others = tl.load(blocks + others, mask=others < num_blocks, other=NO_BLOCK)
        rank += tl.sum((others > own).to(tl.int32))
        real += tl.sum((others != NO_BLOCK).to(tl.int32))
    heads = tl.arange(0, BLOCK_H)
    first = heads // section * section
    beside = tl.minimum(section, num_heads - first)
    back = (tl.cdiv(num_heads, section) - 1 - heads // section) % 2 == 1
    place = first * real + tl.where(back, real - 1 - rank, rank) * beside + heads - first
    turn, program = place // num_programs, _to_and_fro(place, num_programs)
    tile = (own >> 32 << 48) | (heads.to(tl.int64) << 32) | (own & 0xFFFFFFFF)
    fits = (heads < num_heads) & (own != NO_BLOCK) & (turn < max_tiles)
    tl.store(tiles + program.to(tl.int64) * (max_tiles + 1) + turn, tile, mask=fits)

    programs_here = tl.program_id(0) * num_heads + heads
    turns, rest = real * num_heads // num_programs, real * num_heads % num_programs
    in_last = _to_and_fro(turns * num_programs + programs_here, num_programs) < rest
    counted = (heads < num_heads) & (programs_here < num_programs)
    tl.store(num_tiles + programs_here, turns + in_last.to(tl.int32), mask=counted)


@triton.jit
def _to_and_fro(place, num_programs):
    """Whose turn it is at ``place``; and whose place among its turn a program's is."""
    return tl.where(place // num_programs % 2 == 1, num_programs - 1 - place % num_programs, place % num_programs)
