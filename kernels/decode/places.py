"""Where rows lie: of packed sequences, and of keys in pages. Device code."""

import triton
import triton.language as tl

from attnpatch.kernels.common.primitives import head_base, tile_bounds


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
def row_stretches(position, num_keys, window_left, window_right):
    """Keys [start, stop) that the band leaves to queries at ``position``."""
    start = position * 0
    stop = position * 0 + num_keys
    if window_left is not None:
        start = tl.maximum(position - window_left, start)
    if window_right is not None:
        stop = tl.maximum(tl.minimum(position + window_right + 1, stop), 0)
    return start, stop


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
    ALIGNED: tl.constexpr = False,
    TRANSPOSED: tl.constexpr = False,
):
    """Keys n, n + 1, ... of head h as ``[BLOCK_N, BLOCK_COLS]``, zeros from key ``stop`` and column WIDTH on.

    They are rows ``first + n`` on of sequence b, or lie in ``pages``. Without a ``stop`` all of them exist. A tile that
    is loaded TRANSPOSED can be the left operand of a product; of one that is turned later, Triton 3.6 would not make
    asynchronous copies. All rows of an ALIGNED x begin at multiples of 16 bytes.
    """
    inside = tile_bounds(n, stop, WIDTH, BLOCK_N, BLOCK_COLS)
    cols = tl.arange(0, BLOCK_COLS).to(tl.int64) * strides[3]
    if pages is None:
        corner = head_base(x, strides, b, h) + tl.cast(first + n, tl.int64) * strides[2]
        rows = tl.arange(0, BLOCK_N).to(tl.int64) * strides[2]
        if ALIGNED:
            pointers = _pointers_by_eights(corner, strides, cols, BLOCK_N, TRANSPOSED)
        else:
            pointers = corner + (rows[None, :] + cols[:, None] if TRANSPOSED else rows[:, None] + cols[None, :])
    else:
        rows = ((n + tl.arange(0, BLOCK_N)) % PAGE_SIZE).to(tl.int64)
        corners = x + pages * strides[0] + h.to(tl.int64) * strides[1] + rows * strides[2]
        pointers = corners[None, :] + cols[:, None] if TRANSPOSED else corners[:, None] + cols[None, :]
    return tl.load(pointers, mask=inside.T if TRANSPOSED else inside, other=0.0)


@triton.jit
def _pointers_by_eights(corner, strides, cols, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Pointers to rows that begin at multiples of 16 bytes.

    The rows of a thread lie a multiple of eight apart. Added last, such steps are constants in the copies, where they
    otherwise are two registers each and an addition for each copy (ptxas of Triton 3.6).
    """
    row = tl.arange(0, 8).to(tl.int64) * strides[2]
    eight = tl.arange(0, BLOCK_N // 8).to(tl.int64) * (8 * strides[2])
    if TRANSPOSED:
        pointers = (corner + (cols[:, None, None] + row[None, None, :])) + eight[None, :, None]
        pointers = tl.reshape(pointers, [cols.shape[0], BLOCK_N])
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (16, 1)), (cols.shape[0], 1))
    else:
        pointers = (corner + (row[None, :, None] + cols[None, None, :])) + eight[:, None, None]
        pointers = tl.reshape(pointers, [BLOCK_N, cols.shape[0]])
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (1, 16)), (1, cols.shape[0]))
    return pointers


@triton.jit
def load_scales(scale, strides, pages, b, h, first, keys, stop, BY_16: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The scale of each of ``keys`` of head h, 0 from key ``stop`` on; without one, of all.

    BY_16: sixteen keys that begin at a multiple of 16 have scales wherever one of them has.
    """
    pointers = _scale_pointers(scale, strides, pages, b, h, first, keys, PAGE_SIZE)
    if stop is None:
        found = tl.load(pointers)
    else:
        end = tl.multiple_of(tl.cdiv(stop, 16) * 16, 16) if BY_16 else stop
        found = tl.load(pointers, mask=keys < end, other=0.0)
    return found.to(tl.float32)


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


@triton.jit
def in_stretch(keys, start, stop, ALIKE: tl.constexpr):
    """Which keys each row's stretch holds, ``[rows or 1, keys]``."""
    if ALIKE:
        visible = ((keys >= start) & (keys < stop))[None, :]
    else:
        visible = (keys[None, :] >= start[:, None]) & (keys[None, :] < stop[:, None])
    return visible
