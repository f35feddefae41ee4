"""Flash-attention forward (Dao, arXiv 2307.08691) with the mask as terms.

One program owns BLOCK_M query rows of one head and walks the keys in blocks of BLOCK_N:

    s = q k^T (scale, softcap, bias; hidden -> -inf);   p = exp2(s - m);   acc = acc * alpha + p v

Band (causal, window, offset) and bounds cut the keys into three runs, and keys outside of them are never loaded:

    lo ........ full_lo ........................ full_hi ........ hi
       run 0             run 2: every row sees           run 1
       a left edge       every key, no element mask      diagonal, a right edge, or the end of K

A mask or padding makes all of it run 1, but where the bounds of every row are plain.
The unmasked run comes last: before another loop, ptxas serialises its products (tests/kernels/test_sass.py).

Where ``done`` says which tiles another kernel computes, programs stay and walk the others.

Letters: b batch, h query head, m query row, n key, d head dim.
"""

import triton
import triton.language as tl

from attnpatch.kernels.common.primitives import (
    LOG2E,
    accumulate,
    apply_mask_tile,
    in_band,
    load_bounds,
    load_offset,
    load_padding,
    load_per_head,
    load_rows,
    mask_pointers,
    natural_lse,
    natural_scores,
    normalised,
    online_softmax,
    products,
    store_rows,
    with_sink,
)


@triton.jit
def _program_tile(program, seqlen_q, total_heads, heads_per_section, BLOCK_M: tl.constexpr):
    """Query block and flat head of a program.

    Heads go in sections whose K and V fit L2; inside one, the last query blocks, which see most keys, come first.
    """
    num_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    section = program // (num_blocks * heads_per_section)
    first_head = section * heads_per_section
    heads = tl.minimum(heads_per_section, total_heads - first_head)
    rank = program - first_head * num_blocks
    return num_blocks - 1 - rank // heads, first_head + rank % heads


@triton.jit
def _row_stretches(key_bounds, strides, b, h, rows, offset, seqlen_q, seqlen_k, window_left, window_right):
    """Keys [start, stop) that bounds and band leave to each of ``rows``, and which rows are plain.

    A row past the last repeats it: extremes over a tile are those of its real rows.
    """
    rows = tl.minimum(rows, seqlen_q - 1)
    start, stop, plain = load_bounds(key_bounds, strides, b, h, rows)
    start, stop = tl.maximum(start, 0), tl.minimum(stop, seqlen_k)
    if window_left is not None:
        start = tl.maximum(start, rows + offset - window_left)
    if window_right is not None:
        stop = tl.minimum(stop, rows + offset + window_right + 1)
    return start, tl.maximum(stop, 0), plain


@triton.jit
def _see_themselves(start, stop, rows, offset, seqlen_q):
    """Whether each row's stretch holds the row's own position: then the stretches of a tile leave no gap."""
    position = tl.minimum(rows, seqlen_q - 1) + offset
    return tl.min(((start <= position) & (position < stop)).to(tl.int32)) != 0


@triton.jit
def _band_of_tile(first, last, seqlen_k, window_left, window_right):
    """Keys [lo, hi) that some row at positions first..last sees under the band, and [full_lo, full_hi) that all see."""
    lo = 0
    full_lo = 0
    hi = seqlen_k
    full_hi = seqlen_k
    if window_left is not None:
        lo = tl.maximum(first - window_left, 0)
        full_lo = tl.maximum(last - window_left, 0)
    if window_right is not None:
        hi = tl.minimum(tl.maximum(last + window_right + 1, 0), seqlen_k)
        full_hi = tl.minimum(tl.maximum(first + window_right + 1, 0), seqlen_k)
    return lo, full_lo, full_hi, hi


@triton.jit
def _key_runs(lo, full_lo, full_hi, hi, elementwise, BLOCK_N: tl.constexpr):
    """The runs of the module's picture: edges, multiples of BLOCK_N but hi. ``elementwise`` makes all of it run 1."""
    lo = lo // BLOCK_N * BLOCK_N
    full_lo = tl.minimum(tl.cdiv(full_lo, BLOCK_N), tl.cdiv(hi, BLOCK_N)) * BLOCK_N
    full_hi = tl.maximum(full_hi // BLOCK_N * BLOCK_N, full_lo)
    full_lo = tl.where(elementwise, lo, full_lo)
    full_hi = tl.where(elementwise, lo, full_hi)
    return (lo, full_hi, full_lo), (full_lo, hi, full_hi)


@triton.jit
def _is_left(program, done, done_strides, num_heads, place, BLOCK_M: tl.constexpr, DONE_ROWS: tl.constexpr):
    """Whether no other kernel computes the tile of a program, or of each of several."""
    seqlen_q, total_heads, heads_per_section = place
    m_block, flat_head = _program_tile(program, seqlen_q, total_heads, heads_per_section, BLOCK_M)
    b, h, tile = flat_head // num_heads, flat_head % num_heads, m_block * BLOCK_M // DONE_ROWS
    return tl.load(done + b * done_strides[0] + h * done_strides[1] + tile * done_strides[2]) == 0


@triton.jit
def _attend(
    m_block,
    flat_head,
    tensors,
    terms,
    band,
    row_strides,
    term_strides,
    sizes,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Output of BLOCK_M query rows of one head; arguments are the kernel's."""
    q, k, v, o, lse = tensors
    attn_mask, key_padding, key_bounds, sinks, alibi_slopes, sm_scale, softcap = terms
    q_offset, offset_stride, window_left, window_right = band
    q_strides, k_strides, v_strides, o_strides = row_strides
    mask_strides, padding_strides, bounds_strides, sinks_strides, slopes_strides = term_strides
    num_heads, seqlen_q, seqlen_k = sizes
    HAS_TILE_TERMS: tl.constexpr = attn_mask is not None or key_padding is not None
    HAS_BIAS: tl.constexpr = attn_mask is not None and attn_mask.dtype.element_ty != tl.int1
    MAY_HIDE: tl.constexpr = (
        HAS_TILE_TERMS or key_bounds is not None or window_left is not None or window_right is not None
    )
    NATURAL: tl.constexpr = softcap is not None or alibi_slopes is not None
    FIRST_RUN: tl.constexpr = 1 if key_bounds is None and (HAS_TILE_TERMS or window_left is None) else 0
    LAST_RUN: tl.constexpr = 1 if key_bounds is None and HAS_TILE_TERMS else 2

    b, h = flat_head // num_heads, flat_head % num_heads
    h_kv = h // GROUP_SIZE
    m = m_block * BLOCK_M
    rows = m + tl.arange(0, BLOCK_M)
    offset = load_offset(q_offset, offset_stride, b)
    first, last = m + offset, tl.minimum(m + BLOCK_M, seqlen_q) - 1 + offset
    if key_bounds is None:
        plain, scattered = False, True
        lo, full_lo, full_hi, hi = _band_of_tile(first, last, seqlen_k, window_left, window_right)
        elementwise = HAS_TILE_TERMS
    else:
        start, stop, row_plain = _row_stretches(
            key_bounds, bounds_strides, b, h, rows, offset, seqlen_q, seqlen_k, window_left, window_right
        )
        lo, full_lo, full_hi, hi = tl.min(start), tl.max(start), tl.min(stop), tl.max(stop)
        plain = tl.min(row_plain) != 0
        elementwise = HAS_TILE_TERMS and not plain
        scattered = elementwise or not (full_lo <= full_hi or _see_themselves(start, stop, rows, offset, seqlen_q))
    starts, stops = _key_runs(lo, full_lo, full_hi, hi, elementwise, BLOCK_N)

    scale = LOG2E if NATURAL else sm_scale * LOG2E
    q_tile = load_rows(q, q_strides, b, h, m, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_D)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for run in tl.static_range(FIRST_RUN, LAST_RUN + 1):
        for n in tl.range(starts[run], stops[run], BLOCK_N):
            k_tile = load_rows(k, k_strides, b, h_kv, n, seqlen_k, HEAD_DIM, BLOCK_N, BLOCK_D)
            s = products(q_tile, k_tile, PRECISION)  # [BLOCK_M, BLOCK_N]
            if NATURAL or (run != 2 and HAS_BIAS):
                s = natural_scores(s, sm_scale, softcap)
            keys = n + tl.arange(0, BLOCK_N)
            position = (rows + offset)[:, None]
            if alibi_slopes is not None:
                slope = load_per_head(alibi_slopes, slopes_strides, b, h)
                s -= slope * tl.abs(position - keys[None, :])
            if run != 2:
                if key_bounds is None:
                    visible = in_band(position, position, keys[None, :], seqlen_k, window_left, window_right)
                    live = in_band(first, last, keys, seqlen_k, window_left, window_right)  # seen by some row
                else:
                    visible = (keys[None, :] >= start[:, None]) & (keys[None, :] < stop[:, None])
                    live = (keys >= lo) & (keys < hi)  # if the rows' stretches leave no gap
                if key_padding is not None:
                    real = load_padding(key_padding, padding_strides, b, keys, (keys < seqlen_k) & (not plain))
                    visible = visible & real[None, :]
                    live = live & real
                if attn_mask is not None:
                    exists = (rows < seqlen_q)[:, None] & (keys < seqlen_k)[None, :]
                    pointers = mask_pointers(attn_mask, mask_strides, b, h, rows, keys)
                    s, visible = apply_mask_tile(s, visible & exists, pointers, exists & (not plain))
                s = tl.where(visible, s, float("-inf"))
                if scattered and (attn_mask is not None or key_bounds is not None):
                    live = tl.max(s, axis=0) != float("-inf")
            p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, LOG2E if run != 2 and HAS_BIAS else scale)
            v_tile = load_rows(v, v_strides, b, h_kv, n, seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV)
            # A cache tail may hold NaN, and 0 * NaN is NaN.
            if run != 2 and MAY_HIDE and (scattered or n < lo or n + BLOCK_N > hi):
                v_tile = tl.where(live[:, None], v_tile, 0.0)
            acc = accumulate(acc, alpha, p, v_tile, PRECISION)

    if sinks is not None:
        alpha, m_i, l_i = with_sink(m_i, l_i, load_per_head(sinks, sinks_strides, b, h))
        acc *= alpha[:, None]
    if lse is not None:
        tl.store(lse + flat_head.to(tl.int64) * seqlen_q + rows, natural_lse(m_i, l_i), mask=rows < seqlen_q)
    store_rows(o, o_strides, b, h, m, seqlen_q, normalised(acc, l_i), HEAD_DIM_V, BLOCK_M, BLOCK_DV)


@triton.jit(
    do_not_specialize=[
        *("q_offset", "window_left", "window_right"),
        *("num_heads", "total_heads", "heads_per_section", "seqlen_q", "seqlen_k"),
    ]
)
def _prefill_kernel(
    q,  # [batch, num_heads, seqlen_q, HEAD_DIM]
    k,  # [batch, num_kv_heads, seqlen_k, HEAD_DIM], pointer or tensor descriptor (strides None)
    v,  # [batch, num_kv_heads, seqlen_k, HEAD_DIM_V], likewise
    attn_mask,  # bool or additive [batch, num_heads, seqlen_q, seqlen_k], or None
    key_padding,  # bool [batch, seqlen_k], or None
    key_bounds,  # int32 [batch, num_heads, seqlen_q, 3], or None
    sinks,  # [batch, num_heads], or None
    alibi_slopes,  # fp32 [batch, num_heads], or None
    q_offset,  # int, or a pointer read with offset_stride
    o,  # [batch, num_heads, seqlen_q, HEAD_DIM_V]
    lse,  # fp32 [batch, num_heads, seqlen_q], contiguous, or None
    done,  # int32 [batch, num_heads, tiles]: not 0 where another kernel computes those DONE_ROWS rows; or None
    sm_scale,
    softcap,
    window_left,
    window_right,
    q_strides,
    k_strides,
    v_strides,
    mask_strides,
    padding_strides,
    bounds_strides,
    sinks_strides,
    slopes_strides,
    offset_stride,
    o_strides,
    done_strides,
    num_heads,
    total_heads,
    heads_per_section,
    seqlen_q,
    seqlen_k,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DONE_ROWS: tl.constexpr,
    LOOK: tl.constexpr = 64,  # tiles of its share that a program looks at together
):
    """Output of this program's tile; with ``done``, of all that are left of its share."""
    tensors = (q, k, v, o, lse)
    terms = (attn_mask, key_padding, key_bounds, sinks, alibi_slopes, sm_scale, softcap)
    band = (q_offset, offset_stride, window_left, window_right)
    row_strides = (q_strides, k_strides, v_strides, o_strides)
    term_strides = (mask_strides, padding_strides, bounds_strides, sinks_strides, slopes_strides)
    sizes = (num_heads, seqlen_q, seqlen_k)
    if done is None:
        m_block, flat_head = _program_tile(tl.program_id(0), seqlen_q, total_heads, heads_per_section, BLOCK_M)
        _attend(
            m_block, flat_head, tensors, terms, band, row_strides, term_strides, sizes,
            GROUP_SIZE, HEAD_DIM, HEAD_DIM_V, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    else:
        place = (seqlen_q, total_heads, heads_per_section)
        total = tl.cdiv(seqlen_q, BLOCK_M) * total_heads
        num_left = 0
        for first in tl.range(tl.program_id(0), total, LOOK * tl.num_programs(0)):
            share = first + tl.num_programs(0) * tl.arange(0, LOOK)
            share = tl.where(share < total, share, first)
            left = _is_left(share, done, done_strides, num_heads, place, BLOCK_M, DONE_ROWS)
            num_left += tl.sum(left.to(tl.int32))
        stop = tl.where(num_left > 0, total, 0)  # most often nothing is left: programs should end at once
        # what is hoisted out of this loop lives in registers through those over keys, and spills
        for program in tl.range(tl.program_id(0), stop, tl.num_programs(0), disable_licm=True):
            if _is_left(program, done, done_strides, num_heads, place, BLOCK_M, DONE_ROWS):
                m_block, flat_head = _program_tile(program, seqlen_q, total_heads, heads_per_section, BLOCK_M)
                _attend(
                    m_block, flat_head, tensors, terms, band, row_strides, term_strides, sizes,
                    GROUP_SIZE, HEAD_DIM, HEAD_DIM_V, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
