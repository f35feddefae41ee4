"""Flash-decode: the query rows of a KV head as one tile, its keys split over programs, then merged.

    _split_kernel     program = (sequence, tile of rows, kv head, split): BLOCK_M rows against keys [lo, hi)
                      -> a normalised output o_s, its maximum m_s (base 2) and sum l_s per split and row
    _merge_kernel     o = sum_s w_s o_s / sum_s w_s  with  w_s = l_s exp2(m_s - max_s m_s);  the sink, and lse

A row is a query of one head; the group's heads of a query lie side by side in a tile, so that a tile of 16 holds one
query of 16 heads or four of 4. One split needs no merge: it finishes by itself.

Each row sees one stretch of keys, by its band and bounds. A program whose share every row sees, all of it, does without
element masks (run 1); one with an edge, or with a mask or padding that may hide something, masks all of it (run 0). A
second loop for the edge alone would wait for its first keys once more, which at 16 queries cost 2 of 43 us.

m and l stay apart: rounded into one float32 lse, about 8 at 4096 keys, a split's weight would be off by 5e-7.

Lengths are read on the device: a static cache is read only up to its valid length, and a CUDA graph replays while
the length grows. A split with no key writes m = -inf and l = 0, and its output is not read.

Keys may lie in pages (a row of ``block_table`` per sequence), packed (``cu_seqlens_k``), and in 8 bits with a scale per
row: scales multiply scores and probabilities, never the elements of K and V.

Letters: b sequence, h query head, i query, r row of a tile, n key, d head dim.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnpatch.kernels.common.primitives import (
    LOG2E,
    accumulate,
    apply_mask_tile,
    head_base,
    load_bounds,
    load_offset,
    load_padding,
    load_per_head,
    natural_lse,
    natural_scores,
    normalised,
    online_softmax,
    products,
    with_sink,
)
from attnpatch.kernels.decode.places import key_pages, load_keys, load_scales, row_pointers, sequence_of
from attnpatch.kernels.decode.plan import plan_of_program, share_of, splits_of_row
from attnpatch.kernels.decode.unpack import unpack_words


@triton.jit
def _row_stretches(position, num_keys, window_left, window_right):
    """Keys [start, stop) that the band leaves to queries at ``position``."""
    start = position * 0
    stop = position * 0 + num_keys
    if window_left is not None:
        start = tl.maximum(position - window_left, start)
    if window_right is not None:
        stop = tl.maximum(tl.minimum(position + window_right + 1, stop), 0)
    return start, stop


@triton.jit(
    do_not_specialize=[
        *("q_offset", "window_left", "window_right", "batch", "num_kv_heads", "seqlen_q", "seqlen_k", "num_pages"),
        *("num_splits", "parts", "least_share", "most_share"),
    ]
)
def _split_kernel(
    q,  # [batch, num_heads, seqlen_q, HEAD_DIM], or packed: [1, num_heads, total_q, HEAD_DIM]
    k,  # [batch, num_kv_heads, seqlen_k, HEAD_DIM], packed likewise, or pages [num_pages, ., PAGE_SIZE, .]
    v,  # the same with HEAD_DIM_V
    k_scale,  # fp32, k's shape without HEAD_DIM, or None
    v_scale,  # likewise
    block_table,  # int [batch, num_blocks], or None
    cu_seqlens_q,  # int32 [batch + 1], contiguous, or None
    cu_seqlens_k,  # likewise
    attn_mask,  # bool or additive [batch, num_heads, seqlen_q, seqlen_k], or None
    key_padding,  # bool [batch, seqlen_k], or None
    key_bounds,  # int32 [batch, num_heads, seqlen_q, 3], or None
    sinks,  # [batch, num_heads], or None; only without a merge
    alibi_slopes,  # fp32 [batch, num_heads], or None
    q_offset,  # int, or a pointer read with offset_stride
    o,  # the output; under MERGES fp32 [num_splits, .., HEAD_DIM_V], then m and l, [num_splits, ..] each, contiguous
    lse,  # fp32, contiguous, q's shape without HEAD_DIM, or None; only without a merge
    sm_scale,
    softcap,
    window_left,
    window_right,
    q_strides,
    k_strides,
    v_strides,
    k_scale_strides,
    v_scale_strides,
    table_strides,
    mask_strides,
    padding_strides,
    bounds_strides,
    sinks_strides,
    slopes_strides,
    offset_stride,
    o_stride_split,
    o_strides,
    batch,
    num_kv_heads,
    seqlen_q,
    seqlen_k,
    num_pages,
    num_splits,
    parts,
    least_share,
    most_share,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    K_UNPACK: tl.constexpr,
    V_UNPACK: tl.constexpr,
    K_SCALE_PER_HEAD: tl.constexpr,
    V_SCALE_PER_HEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGES: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Output of a tile of rows over one split of their keys."""
    HAS_BIAS: tl.constexpr = attn_mask is not None and attn_mask.dtype.element_ty != tl.int1
    NATURAL: tl.constexpr = HAS_BIAS or softcap is not None or alibi_slopes is not None
    HAS_TILE_TERMS: tl.constexpr = attn_mask is not None or key_padding is not None
    SCATTERED: tl.constexpr = HAS_TILE_TERMS or key_bounds is not None
    ALIKE: tl.constexpr = ONE_QUERY and key_bounds is None  # every row of the tile sees the same stretch
    MAY_MASK: tl.constexpr = SCATTERED or (not ONE_QUERY and (window_left is not None or window_right is not None))
    MAY_NOT_MASK: tl.constexpr = key_bounds is not None or not HAS_TILE_TERMS
    K_STEP: tl.constexpr = 1 if K_UNPACK is None else 2  # elements per loaded word
    V_STEP: tl.constexpr = 1 if V_UNPACK is None else 2
    BLOCK_K: tl.constexpr = BLOCK_D // K_STEP
    BLOCK_V: tl.constexpr = BLOCK_DV // V_STEP
    if K_UNPACK is not None:
        k = k.to(tl.pointer_type(tl.int16), bitcast=True)
    if V_UNPACK is not None:
        v = v.to(tl.pointer_type(tl.int16), bitcast=True)

    if PDL:
        gdc_launch_dependents()  # the merge starts up meanwhile; it waits for this kernel's end before it reads
    b, h_kv, tile, split, splits = plan_of_program(
        *(q_offset, offset_stride, cu_seqlens_q, cu_seqlens_k, batch, num_kv_heads, seqlen_q, seqlen_k),
        *(window_left, window_right, num_splits, parts, least_share, most_share),
        *(GROUP_SIZE, BLOCK_M, BLOCK_N, BLOCK_B),
    )
    if b >= batch:
        return
    b_q, first_query, num_queries = sequence_of(cu_seqlens_q, b, seqlen_q)
    b_k, first_key, num_keys = sequence_of(cu_seqlens_k, b, seqlen_k)
    offset = load_offset(q_offset, offset_stride, b)
    tile_rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = tile_rows < num_queries * GROUP_SIZE
    real_rows = tl.minimum(tile_rows, num_queries * GROUP_SIZE - 1)  # rows past the last repeat it
    queries = real_rows // GROUP_SIZE
    heads = h_kv * GROUP_SIZE + real_rows % GROUP_SIZE

    plain, elementwise = 0, HAS_TILE_TERMS
    start, stop = _row_stretches(offset if ONE_QUERY else queries + offset, num_keys, window_left, window_right)
    if key_bounds is not None:
        first_key_of_row, stop_of_row, plains = load_bounds(key_bounds, bounds_strides, b, heads, queries)
        start, stop = tl.maximum(start, first_key_of_row), tl.minimum(stop, stop_of_row)
        plain = tl.min(plains, 0)
        elementwise = HAS_TILE_TERMS and plain == 0
    if ALIKE:
        lo, full_lo, full_hi, hi = start, start, stop, stop
    else:
        lo, full_lo, full_hi, hi = tl.min(start, 0), tl.max(start, 0), tl.min(stop, 0), tl.max(stop, 0)
        hi = tl.where(tl.max(stop - start, 0) > 0, hi, lo)
    share = share_of(tl.maximum(hi - lo, 0), splits, least_share, most_share, BLOCK_N)
    lo += split * share
    hi = tl.minimum(lo + share, hi)
    cut = tl.where(elementwise | (lo < full_lo) | (hi > full_hi), hi, lo)
    starts, stops = (lo, cut), (cut, hi)

    if K_SCALE_PER_HEAD:
        head_scale = load_per_head(k_scale, k_scale_strides, b_k, h_kv)
    scale = LOG2E if NATURAL else sm_scale * LOG2E
    dims = tl.arange(0, BLOCK_K) * K_STEP
    in_width = exists[:, None] & (dims < HEAD_DIM)[None, :]
    q_pointers = row_pointers(q, q_strides, b_q, heads, first_query + queries, dims)
    q_tile = tl.load(q_pointers, mask=in_width, other=0.0)
    if K_UNPACK is not None:
        q_odd = tl.load(q_pointers + q_strides[3], mask=in_width, other=0.0)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)  # columns 1, 3, ..., where V is loaded in words
    for run in tl.static_range(2):
        if (MAY_MASK, MAY_NOT_MASK)[run]:
            pages = None
            if block_table is not None:
                keys = starts[run] + tl.arange(0, BLOCK_N)
                pages = key_pages(block_table, table_strides, b, keys, keys < stops[run], num_pages, PAGE_SIZE)
            for n in tl.range(starts[run], stops[run], BLOCK_N):
                keys = n + tl.arange(0, BLOCK_N)
                inside = keys < stops[run]
                k_tile = load_keys(
                    *(k, k_strides), pages, *(b_k, h_kv, first_key, n, stops[run]),
                    *(HEAD_DIM // K_STEP, PAGE_SIZE, BLOCK_N, BLOCK_K),
                )  # fmt: skip
                v_tile = load_keys(
                    *(v, v_strides), pages, *(b_k, h_kv, first_key, n, stops[run]),
                    *(HEAD_DIM_V // V_STEP, PAGE_SIZE, BLOCK_N, BLOCK_V),
                )  # fmt: skip
                if K_UNPACK is None:
                    s = products(q_tile, k_tile.to(q_tile.dtype), PRECISION)  # [BLOCK_M, BLOCK_N]
                else:
                    k_even, k_odd = unpack_words(k_tile, K_UNPACK, q_tile.dtype)
                    s = tl.dot(q_odd, k_odd.T, tl.dot(q_tile, k_even.T))
                if K_SCALE_PER_HEAD:
                    s *= head_scale  # not a part of sm_scale: it may be negative
                elif k_scale is not None:
                    scales = load_scales(k_scale, k_scale_strides, pages, b_k, h_kv, first_key, keys, inside, PAGE_SIZE)
                    s *= scales[None, :]
                if NATURAL:
                    s = natural_scores(s, sm_scale, softcap)
                if alibi_slopes is not None:
                    slopes = load_per_head(alibi_slopes, slopes_strides, b, heads)
                    s -= slopes[:, None] * tl.abs((queries + offset)[:, None] - keys[None, :])
                visible = inside[None, :]
                if run == 0:
                    visible = visible & _in_stretch(keys, start, stop, ALIKE)
                    if key_padding is not None:
                        real = load_padding(key_padding, padding_strides, b, keys, inside & (plain == 0))
                        visible = visible & real[None, :]
                    if attn_mask is not None:
                        read = exists[:, None] & inside[None, :]
                        pointers = row_pointers(attn_mask, mask_strides, b, heads, queries, keys)
                        s, visible = apply_mask_tile(s, visible & read, pointers, read & (plain == 0))
                s = tl.where(visible, s, float("-inf"))
                p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, scale)
                seen = inside
                if run == 0 and SCATTERED:  # an unwritten slot may hold NaN, and 0 * NaN is NaN
                    seen = tl.max(s, axis=0) != float("-inf")
                    v_tile = tl.where(seen[:, None], v_tile, tl.zeros_like(v_tile))
                largest = 1.0
                if v_scale is not None and not V_SCALE_PER_HEAD:
                    scales = load_scales(v_scale, v_scale_strides, pages, b_k, h_kv, first_key, keys, inside, PAGE_SIZE)
                    scales = tl.where(seen, scales, 0.0)  # not the load's mask: a load after the product is not pipelined
                    if q_tile.dtype == tl.float16:  # a product with p may be too small for it: 4 / 57344 is
                        largest = tl.max(scales)
                        largest = tl.where(largest > 0.0, largest, 1.0)
                        scales /= largest
                        alpha /= largest
                    p *= scales[None, :]
                if V_UNPACK is None:
                    acc = accumulate(acc, alpha, p, v_tile.to(q_tile.dtype), PRECISION) * largest
                else:
                    v_even, v_odd = unpack_words(v_tile, V_UNPACK, q_tile.dtype)
                    acc = accumulate(acc, alpha, p, v_even, PRECISION) * largest
                    acc_odd = accumulate(acc_odd, alpha, p, v_odd, PRECISION) * largest
                if block_table is not None:  # ids come a tile early: a tile's loads then wait for no other load
                    keys += BLOCK_N
                    pages = key_pages(block_table, table_strides, b, keys, keys < stops[run], num_pages, PAGE_SIZE)

    if V_SCALE_PER_HEAD:
        factor = load_per_head(v_scale, v_scale_strides, b_k, h_kv)
        acc *= factor
        acc_odd *= factor
    if sinks is not None:
        alpha, m_i, l_i = with_sink(m_i, l_i, load_per_head(sinks, sinks_strides, b, heads))
        acc *= alpha[:, None]
        acc_odd *= alpha[:, None]
    statistic = (b_q * num_kv_heads * GROUP_SIZE + heads) * seqlen_q + first_query + queries
    if lse is not None:
        tl.store(lse + statistic, natural_lse(m_i, l_i), mask=exists)
    columns = tl.arange(0, BLOCK_V) * V_STEP
    o_split = o + split.to(tl.int64) * o_stride_split
    o_pointers = row_pointers(o_split, o_strides, b_q, heads, first_query + queries, columns)
    wanted = exists & (m_i != float("-inf")) if MERGES else exists  # the merge reads nothing of an empty split
    o_mask = wanted[:, None] & (columns < HEAD_DIM_V)[None, :]
    tl.store(o_pointers, normalised(acc, l_i).to(o.dtype.element_ty), mask=o_mask)
    if V_UNPACK is not None:
        tl.store(o_pointers + o_strides[3], normalised(acc_odd, l_i).to(o.dtype.element_ty), mask=o_mask)
    if MERGES:
        m, l = statistics(o, num_splits, o_stride_split, HEAD_DIM_V)
        statistic += split.to(tl.int64) * (o_stride_split // HEAD_DIM_V)
        tl.store(m + statistic, m_i, mask=exists)
        tl.store(l + statistic, l_i, mask=exists)


@triton.jit
def statistics(partial, num_splits, split_size, HEAD_DIM_V: tl.constexpr):
    """Where maxima and sums lie: behind the outputs of all splits, ``split_size`` elements each."""
    m = partial + tl.cast(num_splits, tl.int64) * split_size
    return m, m + tl.cast(num_splits, tl.int64) * (split_size // HEAD_DIM_V)


@triton.jit
def _in_stretch(keys, start, stop, ALIKE: tl.constexpr):
    """Which keys each row's stretch holds, ``[rows or 1, keys]``."""
    if ALIKE:
        visible = ((keys >= start) & (keys < stop))[None, :]
    else:
        visible = (keys[None, :] >= start[:, None]) & (keys[None, :] < stop[:, None])
    return visible


@triton.jit(
    do_not_specialize=[
        *("q_offset", "window_left", "window_right", "batch", "num_heads", "seqlen_q", "seqlen_k", "num_rows"),
        *("num_splits", "parts", "least_share", "most_share"),
    ]
)
def _merge_kernel(
    partial,  # fp32 [num_splits, .., HEAD_DIM_V], then m and l
    cu_seqlens_q,
    cu_seqlens_k,
    sinks,  # [batch, num_heads], or None
    q_offset,
    o,  # [batch, num_heads, seqlen_q, HEAD_DIM_V]
    lse,  # fp32 [batch, num_heads, seqlen_q], contiguous, or None
    window_left,
    window_right,
    sinks_strides,
    offset_stride,
    o_strides,
    batch,
    num_heads,
    seqlen_q,
    seqlen_k,
    num_rows,
    num_splits,
    parts,
    least_share,
    most_share,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the splits of one row, BLOCK_S at a time."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_DV)
    i, h, b_q = row % seqlen_q, row // seqlen_q % num_heads, row // seqlen_q // num_heads
    splits = splits_of_row(
        *(b_q, i, q_offset, offset_stride, cu_seqlens_q, cu_seqlens_k, batch, seqlen_q, seqlen_k),
        *(window_left, window_right, num_splits, parts, least_share, most_share),
        *(GROUP_SIZE, BLOCK_M, BLOCK_N, BLOCK_B),
    )

    if PDL:
        gdc_wait()
    m, l = statistics(partial, num_splits, num_rows.to(tl.int64) * HEAD_DIM_V, HEAD_DIM_V)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    merged = tl.zeros([BLOCK_DV], tl.float32)
    for first in tl.range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        rows = split.to(tl.int64) * num_rows + row
        m_s = tl.load(m + rows, mask=split < splits, other=float("-inf"))
        l_s = tl.load(l + rows, mask=split < splits, other=0.0)
        written = (m_s != float("-inf"))[:, None] & (cols < HEAD_DIM_V)[None, :]
        o_s = tl.load(partial + rows[:, None] * HEAD_DIM_V + cols[None, :], mask=written, other=0.0)
        new_top = tl.maximum(top, tl.max(m_s, axis=0))
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        alpha = tl.math.exp2(top - safe_top)
        weights = l_s * tl.math.exp2(m_s - safe_top)  # [BLOCK_S]
        total = total * alpha + tl.sum(weights, axis=0)
        merged = merged * alpha + tl.sum(o_s * weights[:, None], axis=0)
        top = new_top
    if sinks is not None:
        alpha, top, total = with_sink(top, total, load_per_head(sinks, sinks_strides, b_q, h))
        merged *= alpha
    if lse is not None:
        tl.store(lse + row, natural_lse(top, total))
    merged *= tl.math.div_rn(1.0, tl.where(total == 0.0, 1.0, total))
    pointers = head_base(o, o_strides, b_q, h) + i.to(tl.int64) * o_strides[2] + cols.to(tl.int64) * o_strides[3]
    tl.store(pointers, merged.to(o.dtype.element_ty), mask=cols < HEAD_DIM_V)
