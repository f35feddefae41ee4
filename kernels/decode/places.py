"""Where rows lie: of packed sequences, and of keys in pages. Device code."""

import triton
import triton.language as tl

from attnpatch.kernels.common.primitives import load_rows, tile_bounds


@triton.jit
def sequence_of(cu_seqlens, b, seqlen):
    """Where sequence ``b`` lies: its index in the batch dimension, its first row there, how many rows."""
    if cu_seqlens is None:
        index, first, length = b, b * 0, seqlen
    else:
        index, first = b * 0, tl.load(cu_seqlens + b)
        length = tl.load(cu_seqlens + b + 1) - first
    return index, first, length


@triton.jit
def row_pointers(base, strides, b, heads, rows, cols):
    """Pointers ``[rows, cols]`` of rows that each have a head of their own; int64 before the multiplies."""
    row = base + b.to(tl.int64) * strides[0] + heads.to(tl.int64) * strides[1] + rows.to(tl.int64) * strides[2]
    return row[:, None] + cols.to(tl.int64)[None, :] * strides[3]


@triton.jit
def key_pages(block_table, strides, b, keys, inside, num_pages, PAGE_SIZE: tl.constexpr):
    """The page of each of ``keys`` that is ``inside``, int64; ids are clamped into the pool."""
    pointers = block_table + b.to(tl.int64) * strides[0] + (keys // PAGE_SIZE).to(tl.int64) * strides[1]
    pages = tl.load(pointers, mask=inside, other=0)
    return tl.minimum(tl.maximum(pages, 0), num_pages - 1).to(tl.int64)


@triton.jit
def load_keys(
    x,
    strides,
    pages,
    b,
    h,
    first,
    n,
    stop,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Keys n, n + 1, ... of head h as ``[BLOCK_N, BLOCK_COLS]``, zeros from key ``stop`` and column WIDTH on.

    They are rows ``first + n`` on of sequence b, or lie in ``pages``.
    """
    if pages is None:
        tile = load_rows(x, strides, b, h, first + n, first + stop, WIDTH, BLOCK_N, BLOCK_COLS)
    else:
        rows = (n + tl.arange(0, BLOCK_N)) % PAGE_SIZE
        corner = x + pages * strides[0] + h.to(tl.int64) * strides[1] + rows.to(tl.int64) * strides[2]
        pointers = corner[:, None] + tl.arange(0, BLOCK_COLS).to(tl.int64)[None, :] * strides[3]
        tile = tl.load(pointers, mask=tile_bounds(n, stop, WIDTH, BLOCK_N, BLOCK_COLS), other=0.0)
    return tile


@triton.jit
def load_scales(scale, strides, pages, b, h, first, keys, inside, PAGE_SIZE: tl.constexpr):
    """The scale of each of ``keys`` of head h, 0 for those that are not ``inside``."""
    pointers = _scale_pointers(scale, strides, pages, b, h, first, keys, PAGE_SIZE)
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_norms(
    scale,
    strides,
    pages,
    b,
    h,
    first,
    keys,
    inside,
    BLOCKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """The norm of each byte of codes of head h, ``[keys, BLOCK_COLS]``, 0 for keys that are not ``inside``."""
    channels, block, end = 2 * tl.arange(0, BLOCK_COLS), tl.zeros([BLOCK_COLS], tl.int32), 0
    for i in tl.static_range(len(BLOCKS) - 1):
        end += BLOCKS[i]
        block += (channels >= end).to(tl.int32)
    pointers = _scale_pointers(scale, strides, pages, b, h, first, keys, PAGE_SIZE)
    pointers = pointers[:, None] + block.to(tl.int64)[None, :] * strides[3]
    return tl.load(pointers, mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def _scale_pointers(scale, strides, pages, b, h, first, keys, PAGE_SIZE: tl.constexpr):
    if pages is None:
        rows = first + keys
        base = scale + b.to(tl.int64) * strides[0]
    else:
        rows = keys % PAGE_SIZE
        base = scale + pages * strides[0]
    return base + h.to(tl.int64) * strides[1] + rows.to(tl.int64) * strides[2]
