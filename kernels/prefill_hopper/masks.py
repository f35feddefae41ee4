"""What a tile sees: its key blocks, and inside a block which scores count and which rows of V hold numbers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


@gluon.jit
def seen_keys(m, offset, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M: gl.constexpr):
    """Keys [lo, hi) that some row of the tile at query row ``m`` sees, and [full_lo, full_hi) that all see.

    Plain arithmetic, as is :func:`key_blocks`: the schedule calls the functions inside (``.fn``) on the host.
    """
    first, last = m + offset, min(m + BLOCK_M, seqlen_q) - 1 + offset
    lo, full_lo, full_hi, hi = 0, 0, seqlen_k, seqlen_k
    if window_left is not None:
        lo = max(first - window_left, 0)
        full_lo = max(last - window_left, 0)
    if window_right is not None:
        hi = min(max(last + window_right + 1, 0), seqlen_k)
        full_hi = min(max(first + window_right + 1, 0), seqlen_k)
    return lo, full_lo, full_hi, hi


@gluon.jit
def key_blocks(lo, full_lo, full_hi, hi, BLOCK_N: gl.constexpr):
    """Key blocks of a tile: the last, how many, how many masked on the right and on the left.

    One at least, so that loads and products have a first; where nothing is visible, its mask hides all of it.
    """
    start, stop = lo // BLOCK_N, (hi + BLOCK_N - 1) // BLOCK_N
    num = max(stop - start, 1)
    right = min(max(stop - full_hi // BLOCK_N, 1), num)
    left = min(max((full_lo + BLOCK_N - 1) // BLOCK_N - start, 0), num - right)
    return max(stop - 1, 0), num, right, left


@gluon.jit
def tile_range(m_block, b, h, offset, work, BLOCK_M: gl.constexpr):
    """What :func:`seen_keys` returns, the row to stop before, and whether rows leave no gap.

    From the table where there is one. Of a tile that is left to another kernel one block is walked and nothing stored.
    """
    _, _, _, seqlen_q, seqlen_k, window_left, window_right, ranges, ranges_strides = work
    if ranges is None:
        lo, full_lo, full_hi, hi = seen_keys(
            m_block * BLOCK_M, offset, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M
        )
        end, joined = seqlen_q, True
    else:
        found = ranges + b * ranges_strides[0] + h * ranges_strides[1] + m_block * ranges_strides[2]
        lo, full_lo, full_hi, hi = gl.load(found + 1), gl.load(found + 2), gl.load(found + 3), gl.load(found + 4)
        end, joined = gl.load(found), gl.load(found + 5) != 0
    return lo, full_lo, full_hi, hi, end, joined


@gluon.jit
def row_bounds(rows, position, b, h, work, row_terms):
    """First key and stop of what each row sees."""
    _, _, _, seqlen_q, seqlen_k, window_left, window_right, _, _ = work
    key_bounds, bounds_strides = row_terms
    start, stop = gl.zeros_like(rows), gl.zeros_like(rows) + seqlen_k
    if key_bounds is not None:
        real = gl.minimum(rows, seqlen_q - 1).to(gl.int64)
        pointers = key_bounds + b.to(gl.int64) * bounds_strides[0] + h * bounds_strides[1] + real * bounds_strides[2]
        start, stop = gl.maximum(-gl.load(pointers), 0), gl.minimum(gl.load(pointers + bounds_strides[3]), seqlen_k)
    if window_left is not None:
        start = gl.maximum(start, position - window_left)
    if window_right is not None:
        stop = gl.minimum(stop, position + window_right + 1)
    return start, stop


@gluon.jit
def hide(s, keys, start, stop, HAS_START: gl.constexpr):
    """Scores, -inf where a row does not see a key."""
    visible = keys[None, :] < stop[:, None]
    if HAS_START:
        visible = visible & (keys[None, :] >= start[:, None])
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _seen_by_some(keys_from, tile, work, row_terms, SLICE: gl.constexpr, BLOCK_M: gl.constexpr, OUT: gl.constexpr):
    """Which of a few keys some row of the tile sees, where the rows' stretches leave gaps."""
    m, offset, b, h, _, _, _ = tile
    ROWS_AND_KEYS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    rows = m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, ROWS_AND_KEYS))
    start, stop = row_bounds(rows, rows + offset, b, h, work, row_terms)
    keys = keys_from + gl.arange(0, SLICE, gl.SliceLayout(1, ROWS_AND_KEYS))
    seen = (keys[:, None] >= start[None, :]) & (keys[:, None] < stop[None, :])
    return gl.convert_layout(gl.max(seen.to(gl.int32), 1), gl.SliceLayout(1, OUT)) != 0


@gluon.jit
def clean_values(v_s, stage, first, tile, work, row_terms, BLOCK_M: gl.constexpr):
    """Zero the rows of a block of V that no row of the tile sees: they may hold NaN, and 0 * NaN is NaN.

    Each consumer does so before it reads them; the other's zeros are the same. A few rows at a time, for registers.
    """
    key_bounds, _ = row_terms
    _m, _offset, _b, _h, lo, hi, joined = tile
    ROWS_V: gl.constexpr = v_s.shape[3]
    WIDTH: gl.constexpr = v_s.shape[4]
    SLICE: gl.constexpr = 8 if WIDTH > 128 and key_bounds is not None else 16  # fewer registers
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    dirty = (first < lo) | (first + ROWS_V > hi)
    if key_bounds is not None:
        dirty = dirty | (not joined)
    if dirty:
        values = v_s.index(stage).reshape((ROWS_V, WIDTH))
        for row in gl.static_range(0, ROWS_V, SLICE):
            keys = first + row + gl.arange(0, SLICE, gl.SliceLayout(1, LAYOUT))
            live = (keys >= lo) & (keys < hi)
            if key_bounds is not None:
                if not joined:
                    live = live & _seen_by_some(first + row, tile, work, row_terms, SLICE, BLOCK_M, LAYOUT)
            part = values.slice(row, SLICE, dim=0)
            part.store(gl.where(live[:, None], part.load(LAYOUT), 0.0))
        fence_async_shared()
