"""Flash-decode: one query row per sequence, the keys of a KV head split over programs, then merged.

    _decode_split_kernel     program = (b, kv head, split): all query heads of the group against keys [lo, hi)
                             -> a normalised output o_s, its maximum m_s (base 2) and sum l_s per split and head
    _decode_merge_kernel     o = sum_s w_s o_s / sum_s w_s  with  w_s = l_s exp2(m_s - max_s m_s)

m and l stay apart: rounded into one float32 lse, about 8 at 4096 keys, a split's weight would be off by 5e-7.

Lengths are read on the device: each split cuts the keys that the band leaves, so a static cache is read only up to
its valid length, and a CUDA graph replays while the length grows. A split with no key writes zeros, m = -inf and l = 0.

Letters: b batch, h query head, n key, d head dim.
"""

import triton
import triton.language as tl

from attnpatch.kernels.common.primitives import (
    LOG2E,
    accumulate,
    apply_mask_tile,
    head_base,
    load_offset,
    load_padding,
    load_rows,
    natural_scores,
    normalised,
    online_softmax,
    products,
    store_rows,
    tile_pointers,
)


@triton.jit
def _split_keys(offset, seqlen_k, window_left, window_right, split, num_splits, BLOCK_N: tl.constexpr):
    """Keys [lo, hi) of this split: an equal share, in whole blocks, of what the band lets the row see."""
    lo = 0
    hi = seqlen_k
    if window_left is not None:
        lo = tl.maximum(offset - window_left, 0)
    if window_right is not None:
        hi = tl.minimum(offset + window_right + 1, seqlen_k)
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
    q_offset,  # int, or a pointer read with offset_stride
    o,  # [num_splits, batch, num_kv_heads, GROUP_SIZE, HEAD_DIM_V]
    m,  # fp32 [num_splits, batch, num_kv_heads, GROUP_SIZE], contiguous, or None
    l,  # likewise
    sm_scale,
    softcap,
    window_left,
    window_right,
    q_strides,
    k_strides,
    v_strides,
    mask_strides,
    padding_strides,
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
    NATURAL: tl.constexpr = attn_mask is not None or softcap is not None

    split = tl.program_id(0) % num_splits
    group = tl.program_id(0) // num_splits
    b, h_kv = group // num_kv_heads, group % num_kv_heads
    offset = load_offset(q_offset, offset_stride, b)
    lo, hi = _split_keys(offset, seqlen_k, window_left, window_right, split, num_splits, BLOCK_N)

    scale = LOG2E if NATURAL else sm_scale * LOG2E
    q_tile = load_rows(q, q_strides, b, h_kv, 0, GROUP_SIZE, HEAD_DIM, BLOCK_H, BLOCK_D)
    m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    for n in tl.range(lo, hi, BLOCK_N):
        k_tile = load_rows(k, k_strides, b, h_kv, n, hi, HEAD_DIM, BLOCK_N, BLOCK_D)
        v_tile = load_rows(v, v_strides, b, h_kv, n, hi, HEAD_DIM_V, BLOCK_N, BLOCK_DV)
        s = products(q_tile, k_tile, PRECISION)  # [BLOCK_H, BLOCK_N]
        if NATURAL:
            s = natural_scores(s, sm_scale, softcap)
        keys = n + tl.arange(0, BLOCK_N)
        visible = (keys < hi)[None, :]
        if key_padding is not None:
            visible = visible & load_padding(key_padding, padding_strides, b, keys, hi)[None, :]
        if attn_mask is not None:
            head = head_base(attn_mask, mask_strides, b, h_kv)
            pointers = tile_pointers(head, mask_strides, 0, n, BLOCK_H, BLOCK_N)
            inside = (tl.arange(0, BLOCK_H) < GROUP_SIZE)[:, None] & (keys < hi)[None, :]
            s, visible = apply_mask_tile(s, visible, pointers, inside)
        s = tl.where(visible, s, float("-inf"))
        if key_padding is not None or attn_mask is not None:  # an unwritten slot may hold NaN, and 0 * NaN is NaN
            live = tl.max(visible.to(tl.int32), axis=0) > 0
            v_tile = tl.where(live[:, None], v_tile, 0.0)
        p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, scale)
        acc = accumulate(acc, alpha, p, v_tile, PRECISION)

    o_split = o + split.to(tl.int64) * o_stride_split
    store_rows(o_split, o_strides, b, h_kv, 0, GROUP_SIZE, normalised(acc, l_i), HEAD_DIM_V, BLOCK_H, BLOCK_DV)
    if m is not None:
        heads = tl.arange(0, BLOCK_H)
        num_groups = tl.num_programs(0) // num_splits
        row = (split * num_groups + group) * GROUP_SIZE + heads
        tl.store(m + row, m_i, mask=heads < GROUP_SIZE)
        tl.store(l + row, l_i, mask=heads < GROUP_SIZE)


@triton.jit(do_not_specialize=["num_heads", "total_heads", "num_splits"])
def _decode_merge_kernel(
    o_partial,  # fp32 [num_splits, batch, num_heads, HEAD_DIM_V], contiguous
    m,  # fp32 [num_splits, batch, num_heads], contiguous
    l,  # likewise
    o,  # [batch, num_heads, 1, HEAD_DIM_V]
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
    merged = tl.sum(partial * weights[:, None], axis=0) * tl.math.div_rn(1.0, tl.where(total == 0.0, 1.0, total))
    pointers = head_base(o, o_strides, head // num_heads, head % num_heads) + cols.to(tl.int64) * o_strides[3]
    tl.store(pointers, merged.to(o.dtype.element_ty), mask=cols < HEAD_DIM_V)
