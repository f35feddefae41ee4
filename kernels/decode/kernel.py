"""Flash-decode: one query row per sequence, the keys of a KV head split over programs, then merged.

    _decode_split_kernel     program = (b, kv head, split): all query heads of the group against keys [lo, hi)
                             -> a normalised output o_s, its maximum m_s (base 2) and sum l_s per split and head
    _decode_merge_kernel     o = sum_s w_s o_s / sum_s w_s  with  w_s = l_s exp2(m_s - max_s m_s);  the sink, and lse

One split needs no merge: it finishes by itself. Keys that a mask, a padding or bounds of single heads may hide are run
0; those that every head sees, all of them where only the band or bounds alike in plain rows cut the keys, are run 1.

m and l stay apart: rounded into one float32 lse, about 8 at 4096 keys, a split's weight would be off by 5e-7.

Lengths are read on the device: each split cuts the keys that band and bounds leave, so a static cache is read only up
to its valid length, and a CUDA graph replays while the length grows. A split with no key writes zeros, m = -inf and
l = 0.

Letters: b batch, h query head, n key, d head dim.
"""

import triton
import triton.language as tl

from attnpatch.kernels.common.primitives import (
    LOG2E,
    accumulate,
    apply_mask_tile,
    head_base,
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
def _split_keys(offset, lo, hi, window_left, window_right, split, num_splits, BLOCK_N: tl.constexpr):
    """Keys of this split: an equal share, in whole blocks, of what the band lets the row see of [lo, hi)."""
    if window_left is not None:
        lo = tl.maximum(offset - window_left, lo)
    if window_right is not None:
        hi = tl.minimum(offset + window_right + 1, hi)
    share = tl.cdiv(tl.cdiv(tl.maximum(hi - lo, 0), num_splits), BLOCK_N) * BLOCK_N
    lo += split * share
    return lo, tl.minimum(lo + share, hi)


@triton.jit(do_not_specialize=["q_offset", "window_left", "window_right", "num_kv_heads", "num_splits", "seqlen_k"])
def _decode_split_kernel(
    q,  # [batch, num_kv_heads, GROUP_SIZE, HEAD_DIM]
    k,  # [batch, num_kv_heads, seqlen_k, HEAD_DIM]
    v,  # [batch, num_kv_heads, seqlen_k, HEAD_DIM_V]
    attn_mask,  # bool or additive [batch, num_kv_heads, GROUP_SIZE, seqlen_k], or None
    key_padding,  # bool [batch, seqlen_k], or None
    key_bounds,  # int32 [batch, num_kv_heads, GROUP_SIZE, 3], or None
    sinks,  # [batch, num_heads], or None; only without a merge
    alibi_slopes,  # fp32 [batch, num_heads], or None
    q_offset,  # int, or a pointer read with offset_stride
    o,  # [num_splits, batch, num_kv_heads, GROUP_SIZE, HEAD_DIM_V]
    m,  # fp32 [num_splits, batch, num_kv_heads, GROUP_SIZE], contiguous, or None
    l,  # likewise
    lse,  # fp32 [batch, num_heads], contiguous, or None; only without a merge
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
    o_stride_split,
    o_strides,
    num_kv_heads,
    num_splits,
    seqlen_k,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Output of a group's heads over one split of the keys; the heads are the rows of its tiles."""
    HAS_BIAS: tl.constexpr = attn_mask is not None and attn_mask.dtype.element_ty != tl.int1
    NATURAL: tl.constexpr = HAS_BIAS or softcap is not None or alibi_slopes is not None
    HAS_TILE_TERMS: tl.constexpr = attn_mask is not None or key_padding is not None
    FIRST_RUN: tl.constexpr = 0 if HAS_TILE_TERMS or key_bounds is not None else 1
    LAST_RUN: tl.constexpr = 0 if HAS_TILE_TERMS and key_bounds is None else 1

    split = tl.program_id(0) % num_splits
    group = tl.program_id(0) // num_splits
    b, h_kv = group // num_kv_heads, group % num_kv_heads
    offset = load_offset(q_offset, offset_stride, b)
    heads = tl.arange(0, BLOCK_H)
    real_heads = tl.minimum(heads, GROUP_SIZE - 1)  # tiles may be higher than a group
    flat_head = h_kv * GROUP_SIZE + real_heads
    lo, hi, plain, alike = 0, seqlen_k, 0, not HAS_TILE_TERMS
    if key_bounds is not None:
        first_key, stop, plains = load_bounds(key_bounds, bounds_strides, b, h_kv, real_heads)
        lo = tl.maximum(tl.min(first_key, 0), lo)
        hi = tl.minimum(tl.max(stop, 0), hi)
        plain = tl.min(plains, 0)
        alike = (tl.max(first_key, 0) == tl.min(first_key, 0)) & (tl.min(stop, 0) == tl.max(stop, 0))
        alike = alike & (not HAS_TILE_TERMS or plain != 0)
    lo, hi = _split_keys(offset, lo, hi, window_left, window_right, split, num_splits, BLOCK_N)
    cut = tl.where(alike, lo, hi)
    starts, stops = (lo, cut), (cut, hi)

    scale = LOG2E if NATURAL else sm_scale * LOG2E
    q_tile = load_rows(q, q_strides, b, h_kv, 0, GROUP_SIZE, HEAD_DIM, BLOCK_H, BLOCK_D)
    m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    for run in tl.static_range(FIRST_RUN, LAST_RUN + 1):
        for n in tl.range(starts[run], stops[run], BLOCK_N):
            k_tile = load_rows(k, k_strides, b, h_kv, n, hi, HEAD_DIM, BLOCK_N, BLOCK_D)
            v_tile = load_rows(v, v_strides, b, h_kv, n, hi, HEAD_DIM_V, BLOCK_N, BLOCK_DV)
            s = products(q_tile, k_tile, PRECISION)  # [BLOCK_H, BLOCK_N]
            if NATURAL:
                s = natural_scores(s, sm_scale, softcap)
            keys = n + tl.arange(0, BLOCK_N)
            if alibi_slopes is not None:
                slopes = load_per_head(alibi_slopes, slopes_strides, b, flat_head)
                s -= slopes[:, None] * tl.abs(offset - keys)[None, :]
            visible = (keys < hi)[None, :]
            if run == 0 and key_padding is not None:
                real = load_padding(key_padding, padding_strides, b, keys, (keys < hi) & (plain == 0))
                visible = visible & real[None, :]
            if run == 0 and key_bounds is not None:
                visible = visible & (keys[None, :] >= first_key[:, None]) & (keys[None, :] < stop[:, None])
            if run == 0 and attn_mask is not None:
                exists = (heads < GROUP_SIZE)[:, None] & (keys < hi)[None, :]
                pointers = mask_pointers(attn_mask, mask_strides, b, h_kv, heads, keys)
                s, visible = apply_mask_tile(s, visible & exists, pointers, exists & (plain == 0))
            s = tl.where(visible, s, float("-inf"))
            if run == 0:  # an unwritten slot may hold NaN, and 0 * NaN is NaN
                live = tl.max(s, axis=0) != float("-inf")
                v_tile = tl.where(live[:, None], v_tile, 0.0)
            p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, scale)
            acc = accumulate(acc, alpha, p, v_tile, PRECISION)

    if sinks is not None:
        alpha, m_i, l_i = with_sink(m_i, l_i, load_per_head(sinks, sinks_strides, b, flat_head))
        acc *= alpha[:, None]
    if lse is not None:
        tl.store(lse + group * GROUP_SIZE + heads, natural_lse(m_i, l_i), mask=heads < GROUP_SIZE)
    o_split = o + split.to(tl.int64) * o_stride_split
    store_rows(o_split, o_strides, b, h_kv, 0, GROUP_SIZE, normalised(acc, l_i), HEAD_DIM_V, BLOCK_H, BLOCK_DV)
    if m is not None:
        num_groups = tl.num_programs(0) // num_splits
        row = (split * num_groups + group) * GROUP_SIZE + heads
        tl.store(m + row, m_i, mask=heads < GROUP_SIZE)
        tl.store(l + row, l_i, mask=heads < GROUP_SIZE)


@triton.jit(do_not_specialize=["num_heads", "total_heads", "num_splits"])
def _decode_merge_kernel(
    o_partial,  # fp32 [num_splits, batch, num_heads, HEAD_DIM_V], contiguous
    m,  # fp32 [num_splits, batch, num_heads], contiguous
    l,  # likewise
    sinks,  # [batch, num_heads], or None
    o,  # [batch, num_heads, 1, HEAD_DIM_V]
    lse,  # fp32 [batch, num_heads], contiguous, or None
    sinks_strides,
    o_strides,
    num_heads,
    total_heads,
    num_splits,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Merge the splits of one head for BLOCK_DV columns; all splits are one tile."""
    NUM_COL_BLOCKS: tl.constexpr = (HEAD_DIM_V + BLOCK_DV - 1) // BLOCK_DV
    head = tl.program_id(0) // NUM_COL_BLOCKS
    cols = tl.program_id(0) % NUM_COL_BLOCKS * BLOCK_DV + tl.arange(0, BLOCK_DV)
    splits = tl.arange(0, BLOCK_S)
    rows = splits.to(tl.int64) * total_heads + head
    m_s = tl.load(m + rows, mask=splits < num_splits, other=float("-inf"))
    l_s = tl.load(l + rows, mask=splits < num_splits, other=0.0)
    inside = (splits < num_splits)[:, None] & (cols < HEAD_DIM_V)[None, :]
    partial = tl.load(o_partial + rows[:, None] * HEAD_DIM_V + cols[None, :], mask=inside, other=0.0)

    top = tl.max(m_s, axis=0)
    weights = l_s * tl.math.exp2(m_s - tl.where(top == float("-inf"), 0.0, top))  # [BLOCK_S]
    total = tl.sum(weights, axis=0)
    merged = tl.sum(partial * weights[:, None], axis=0)
    b, h = head // num_heads, head % num_heads
    if sinks is not None:
        alpha, top, total = with_sink(top, total, load_per_head(sinks, sinks_strides, b, h))
        merged *= alpha
    if lse is not None:
        tl.store(lse + head, natural_lse(top, total))  # each block of columns writes the same
    merged *= tl.math.div_rn(1.0, tl.where(total == 0.0, 1.0, total))
    pointers = head_base(o, o_strides, b, h) + cols.to(tl.int64) * o_strides[3]
    tl.store(pointers, merged.to(o.dtype.element_ty), mask=cols < HEAD_DIM_V)
