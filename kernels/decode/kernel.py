"""Flash-decode: the query rows of a KV head as one tile, its keys split over programs, then merged.

    _split_kernel     program = (sequence, tile of rows, kv head, split): BLOCK_M rows against keys [lo, hi)
                      -> a normalised output o_s, its maximum m_s (base 2) and sum l_s per split and row
    _merge_kernel     o = sum_s w_s o_s / sum_s w_s  with  w_s = l_s exp2(m_s - max_s m_s), and lse (merge.py)

A row is a query of one head; the group's heads of a query lie side by side in a tile, so that a tile of 16 holds one
query of 16 heads or four of 4. One split needs no merge: it finishes by itself.

Each row sees one stretch of keys, by its band and bounds. A program whose share every row sees, all of it, does without
element masks (run 1); one with an edge, or with a mask or padding that may hide something, masks all of it (run 0). A
second loop for the edge alone would wait for its first keys once more, which at 16 queries cost 2 of 43 us.

m and l stay apart: rounded into one float32 lse, about 8 at 4096 keys, a split's weight would be off by 5e-7.

Lengths are read on the device: a static cache is read only up to its valid length, and a CUDA graph replays while
the length grows. A split with no key writes m = -inf and l = 0, and its output is not read.

Keys may lie in pages (a row of ``block_table`` per sequence), packed (``cu_seqlens_k``), and in 8 bits with a scale per
row, or in 4 with a shift, too (integers.py): scales multiply scores and probabilities, never K and V. Of TBQ4 codes
(codes.py) K meets a q that _rotate_kernel has rotated (queries.py); the merge rotates back. A tile, one per block or
group, unpacks into planes (unpack.py), every second or fourth channel; each has its part of q or its accumulator.

Letters: b sequence, h query head, i query, r row of a tile, n key, d head dim.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnpatch.kernels.common.primitives import (
    LOG2E,
    accumulate,
    apply_mask_tile,
    load_bounds,
    load_offset,
    load_padding,
    load_per_head,
    natural_lse,
    natural_scores,
    normalised,
    online_softmax,
    with_sink,
)
from attnpatch.kernels.decode.codes import BYTES, INT8_WORDS, STEP, positive, scaled
from attnpatch.kernels.decode.int8 import accumulate_int8, bytes_of_weights, keys_for_products
from attnpatch.kernels.decode.integers import load_shifts, nothing_added, sums_of_groups
from attnpatch.kernels.decode.merge import statistics
from attnpatch.kernels.decode.places import (
    in_stretch,
    key_pages,
    load_keys,
    load_norms,
    load_scales,
    row_pointers,
    row_stretches,
    sequence_of,
)
from attnpatch.kernels.decode.plan import plan_of_program, share_of
from attnpatch.kernels.decode.queries import factors_of_rotated, load_queries, scores
from attnpatch.kernels.decode.unpack import planes, pointer_of


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
    k_shift,  # of integers of 4 bits, k_scale's shape, or None
    v_shift,  # likewise
    block_table,  # int [batch, num_blocks], or None
    cu_seqlens_q,  # int32 [batch + 1], contiguous, or None
    cu_seqlens_k,  # likewise
    attn_mask,  # bool or additive [batch, num_heads, seqlen_q, seqlen_k], or None
    key_padding,  # bool [batch, seqlen_k], or None
    key_bounds,  # int32 [batch, num_heads, seqlen_q, 3], or None
    sinks,  # [batch, num_heads], or None; only without a merge
    alibi_slopes,  # fp32 [batch, num_heads], or None
    q_offset,  # int, or a pointer read with offset_stride
    rotated,  # what _rotate_kernel made of q, or None
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
    k_shift_strides,
    v_shift_strides,
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
    K_STEPS: tl.constexpr,
    V_STEPS: tl.constexpr,
    K_TILES: tl.constexpr,
    V_TILES: tl.constexpr,
    K_ALIGNED: tl.constexpr,
    V_ALIGNED: tl.constexpr,
    K_BLOCKS: tl.constexpr,
    V_BLOCKS: tl.constexpr,
    K_SCALE_PER_HEAD: tl.constexpr,
    V_SCALE_PER_HEAD: tl.constexpr,
    WHOLE_NORMS: tl.constexpr,
    DTYPE: tl.constexpr,
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
    MAY_NOT_MASK: tl.constexpr = key_bounds is not None or not HAS_TILE_TERMS
    WIDTH_K: tl.constexpr = HEAD_DIM // (K_STEPS * K_TILES)  # loaded elements of a tile's row
    WIDTH_V: tl.constexpr = HEAD_DIM_V // (V_STEPS * V_TILES)
    BLOCK_K: tl.constexpr = BLOCK_D // (K_STEPS * K_TILES)
    BLOCK_V: tl.constexpr = BLOCK_DV // (V_STEPS * V_TILES)
    K_CODES: tl.constexpr = K_BLOCKS is not None
    V_CODES: tl.constexpr = V_BLOCKS is not None
    K_MIXED: tl.constexpr = K_UNPACK == BYTES and len(K_BLOCKS) > 1  # several norms per tile
    V_MIXED: tl.constexpr = V_UNPACK == BYTES and len(V_BLOCKS) > 1
    K_DTYPE: tl.constexpr = tl.float16 if K_CODES and tl.float32 != DTYPE else DTYPE  # of the products
    V_DTYPE: tl.constexpr = tl.float16 if V_CODES and tl.float32 != DTYPE else DTYPE
    V_SCALES: tl.constexpr = v_scale is not None and not V_SCALE_PER_HEAD and not V_MIXED
    V_INT8: tl.constexpr = V_UNPACK == INT8_WORDS
    WEIGHTS_16: tl.constexpr = V_SCALES and V_DTYPE == tl.float16 and not V_INT8  # no room for all p times a scale
    NO_ODD_START: tl.constexpr = window_left is None and key_bounds is None
    WHOLE_TILES: tl.constexpr = WHOLE_NORMS and NO_ODD_START and K_UNPACK != BYTES and V_UNPACK != BYTES
    BANDED: tl.constexpr = not ONE_QUERY and (window_left is not None or window_right is not None)
    MAY_MASK: tl.constexpr = SCATTERED or BANDED or WHOLE_TILES
    k, v = pointer_of(k, K_UNPACK), pointer_of(v, V_UNPACK)

    if PDL and not K_CODES:
        gdc_wait()  # for whatever ran before; _rotate_kernel has done so
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
    start, stop = row_stretches(offset if ONE_QUERY else queries + offset, num_keys, window_left, window_right)
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
    if WHOLE_TILES:
        share = tl.cdiv(share, 16) * 16  # which it is, and now the compiler knows
    lo += split * share
    hi = tl.minimum(lo + share, hi)
    has_edge = elementwise | (lo < full_lo) | (hi > full_hi)
    if WHOLE_TILES:
        has_edge |= (hi - lo) % BLOCK_N != 0
    starts, stops = (lo, tl.where(has_edge, hi, lo)), (tl.where(has_edge, hi, lo), hi)
    if WHOLE_TILES:  # the compiler believes what it is told: an empty run begins at a multiple of 16, too
        whole = tl.where(has_edge, tl.cdiv(hi, 16) * 16, lo)
        starts = (tl.multiple_of(lo, 16), tl.multiple_of(whole, 16))

    if K_SCALE_PER_HEAD:
        head_scale = load_per_head(k_scale, k_scale_strides, b_k, h_kv)
    scale = LOG2E if NATURAL else sm_scale * LOG2E
    rows = (b_q * num_kv_heads * GROUP_SIZE + heads) * seqlen_q + first_query + queries
    num_rows = o_stride_split // HEAD_DIM_V  # where there is a merge
    if PDL and K_CODES:
        gdc_wait()  # for _rotate_kernel
    q_planes = load_queries(
        q, q_strides, rotated, *(b_q, heads, first_query + queries, rows, num_rows, exists),
        *(K_UNPACK, K_STEPS, K_TILES, HEAD_DIM, DTYPE, BLOCK_K),
    )  # fmt: skip
    if k_shift is not None:
        q_sums = sums_of_groups(q_planes, K_TILES)
    if K_CODES:
        factors = tl.load(factors_of_rotated(rotated, num_rows, HEAD_DIM, DTYPE) + rows)
        if not K_MIXED:
            factors *= STEP
        if not NATURAL:
            scale *= factors
    unit = tl.zeros([BLOCK_M], tl.float32)  # what acc is in units of, where p times a scale is to be a float16
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = ()  # of every plane of V
    for _ in tl.static_range(V_TILES * V_STEPS):
        acc = acc + (tl.zeros([BLOCK_M, BLOCK_V], tl.float32),)
    if v_shift is not None:
        added = nothing_added(BLOCK_M, V_TILES)
    for run in tl.static_range(2):
        if (MAY_MASK, MAY_NOT_MASK)[run]:
            end = None if WHOLE_TILES and run == 1 else stops[run]  # None: no tile reaches past it
            pages = None
            if block_table is not None:
                keys = starts[run] + tl.arange(0, BLOCK_N)
                pages = key_pages(block_table, table_strides, b, keys, keys < stops[run], num_pages, PAGE_SIZE)
            for n in tl.range(starts[run], stops[run], BLOCK_N):
                keys = n + tl.arange(0, BLOCK_N)
                inside = keys < stops[run]
                s, v_tiles = 0.0, ()
                for side in tl.static_range(K_TILES):
                    k_tile = load_keys(
                        *(k + side * WIDTH_K * k_strides[3], k_strides), pages, *(b_k, h_kv, first_key, n), end,
                        *(WIDTH_K, PAGE_SIZE, BLOCK_N, BLOCK_K, K_ALIGNED),
                    )  # fmt: skip
                    if K_UNPACK == INT8_WORDS:
                        k_tile = keys_for_products(k_tile)
                    k_planes = planes(k_tile, K_UNPACK, True, K_DTYPE)
                    if K_MIXED:
                        norms = load_norms(
                            *(k_scale, k_scale_strides), pages, *(b_k, h_kv, first_key, keys, inside),
                            *(K_BLOCKS, PAGE_SIZE, BLOCK_K),
                        )  # fmt: skip
                        k_planes = scaled(k_planes, norms)
                    part = scores(q_planes, side, k_planes, K_UNPACK, PRECISION)
                    if k_scale is not None and not K_MIXED and not K_SCALE_PER_HEAD:
                        base = k_scale if K_TILES == 1 else k_scale + side * k_scale_strides[3]
                        norms = load_scales(
                            base, k_scale_strides, pages, *(b_k, h_kv, first_key, keys), end, WHOLE_TILES, PAGE_SIZE
                        )
                        part *= norms[None, :]
                    if k_shift is not None:
                        shifts = load_shifts(
                            k_shift, k_shift_strides, side, norms, pages, *(b_k, h_kv, first_key, keys), end,
                            *(WHOLE_TILES, PAGE_SIZE),
                        )  # fmt: skip
                        part += q_sums[side][:, None] * shifts[None, :]
                    s = part if side == 0 else s + part
                for side in tl.static_range(V_TILES):
                    v_tile = load_keys(
                        *(v + side * WIDTH_V * v_strides[3], v_strides), pages, *(b_k, h_kv, first_key, n), end,
                        *(WIDTH_V, PAGE_SIZE, BLOCK_N, BLOCK_V, V_ALIGNED, V_INT8),
                    )  # fmt: skip
                    v_tiles = v_tiles + (v_tile,)
                if K_SCALE_PER_HEAD:
                    s *= head_scale  # not a part of sm_scale: it may be negative
                if NATURAL and K_CODES:
                    s *= factors[:, None]
                if NATURAL:
                    s = natural_scores(s, sm_scale, softcap)
                if alibi_slopes is not None:
                    slopes = load_per_head(alibi_slopes, slopes_strides, b, heads)
                    s -= slopes[:, None] * tl.abs((queries + offset)[:, None] - keys[None, :])
                visible = inside[None, :]
                if run == 0:
                    visible = visible & in_stretch(keys, start, stop, ALIKE)
                    if key_padding is not None:
                        real = load_padding(key_padding, padding_strides, b, keys, inside & (plain == 0))
                        visible = visible & real[None, :]
                    if attn_mask is not None:
                        read = exists[:, None] & inside[None, :]
                        pointers = row_pointers(attn_mask, mask_strides, b, heads, queries, keys)
                        s, visible = apply_mask_tile(s, visible & read, pointers, read & (plain == 0))
                if end is not None:
                    s = tl.where(visible, s, float("-inf"))
                p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, scale, K_CODES and not NATURAL)
                seen = inside
                if run == 0 and SCATTERED:  # an unwritten slot may hold NaN, and 0 * NaN is NaN
                    seen = tl.max(s, axis=0) != float("-inf")
                weights, rescale, sums, more = (), alpha, (), ()
                for side in tl.static_range(V_TILES):
                    weight = p
                    if V_SCALES:
                        base = v_scale if V_TILES == 1 else v_scale + side * v_scale_strides[3]
                        norms = load_scales(
                            base, v_scale_strides, pages, *(b_k, h_kv, first_key, keys), end, WHOLE_TILES, PAGE_SIZE
                        )
                        if run == 0 and (SCATTERED or WHOLE_TILES):
                            norms = tl.where(seen, norms, 0.0)  # as the load's mask it would wait for a product
                        weight = p * norms[None, :]
                    if v_shift is not None:
                        shifts = load_shifts(
                            v_shift, v_shift_strides, side, norms, pages, *(b_k, h_kv, first_key, keys), end,
                            *(WHOLE_TILES, PAGE_SIZE),
                        )  # fmt: skip
                        shifts = tl.where(seen, shifts, 0.0)
                        more = more + (added[side] * alpha + tl.sum(p * shifts[None, :], axis=1),)
                    weights = weights + (weight,)
                if WEIGHTS_16:
                    largest = unit * alpha
                    for side in tl.static_range(V_TILES):
                        largest = tl.maximum(largest, tl.max(weights[side], axis=1))
                    per_unit = 1.0 / positive(largest)
                    rescale = unit * alpha * per_unit
                    unit = largest
                for side in tl.static_range(V_TILES):
                    v_tile, weight = v_tiles[side], weights[side]
                    if run == 0 and SCATTERED and not V_INT8:  # codes are numbers whatever they are
                        v_tile = tl.where(seen[:, None], v_tile, tl.zeros_like(v_tile))
                    v_planes = planes(v_tile, V_UNPACK, False, V_DTYPE)
                    if V_MIXED:
                        norms = load_norms(
                            *(v_scale, v_scale_strides), pages, *(b_k, h_kv, first_key, keys, inside),
                            *(V_BLOCKS, PAGE_SIZE, BLOCK_V),
                        )  # fmt: skip
                        v_planes = scaled(v_planes, tl.where(seen[:, None], norms, 0.0))
                    if WEIGHTS_16:
                        weight *= per_unit[:, None]
                    if V_INT8:
                        weight, byte_unit = bytes_of_weights(weight)
                    for j in tl.static_range(V_STEPS):
                        part = acc[side * V_STEPS + j]
                        if V_INT8:
                            below, above = v_planes[j], v_planes[j + V_STEPS]
                            part = accumulate_int8(part, alpha, weight, byte_unit, below, above)
                        else:
                            part = accumulate(part, rescale, weight, v_planes[j], PRECISION)
                        sums = sums + (part,)
                acc = sums
                if v_shift is not None:
                    added = more
                if block_table is not None:  # ids come a tile early: a tile's loads then wait for no other load
                    keys += BLOCK_N
                    pages = key_pages(block_table, table_strides, b, keys, keys < stops[run], num_pages, PAGE_SIZE)

    o_split = o + split.to(tl.int64) * o_stride_split
    if V_SCALE_PER_HEAD:
        head_scale = load_per_head(v_scale, v_scale_strides, b_k, h_kv)
    if sinks is not None:
        alpha, m_i, l_i = with_sink(m_i, l_i, load_per_head(sinks, sinks_strides, b, heads))
    if lse is not None:
        tl.store(lse + rows, natural_lse(m_i, l_i), mask=exists)
    wanted = exists & (m_i != float("-inf")) if MERGES else exists  # the merge reads nothing of an empty split
    for plane in tl.static_range(V_TILES * V_STEPS):
        result = acc[plane]
        if V_SCALE_PER_HEAD:
            result *= head_scale
        if WEIGHTS_16:
            result *= unit[:, None]
        if v_shift is not None:
            result += added[plane // V_STEPS][:, None]
        if V_CODES and not V_MIXED:
            result *= STEP
        if sinks is not None:
            result *= alpha[:, None]
        columns = tl.arange(0, BLOCK_V) * V_STEPS + plane % V_STEPS + plane // V_STEPS * (WIDTH_V * V_STEPS)
        pointers = row_pointers(o_split, o_strides, b_q, heads, first_query + queries, columns)
        in_tile = columns < (plane // V_STEPS + 1) * (HEAD_DIM_V // V_TILES)
        result = normalised(result, l_i).to(o.dtype.element_ty)
        tl.store(pointers, result, mask=wanted[:, None] & in_tile[None, :])
    if MERGES:
        m, l = statistics(o, num_splits, o_stride_split, HEAD_DIM_V)
        rows += split.to(tl.int64) * (o_stride_split // HEAD_DIM_V)
        tl.store(m + rows, m_i, mask=exists)
        tl.store(l + rows, l_i, mask=exists)
