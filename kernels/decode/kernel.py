"""Flash-decode: one query row per sequence, the keys of a KV head split over programs, then merged.

    _decode_split_kernel     program = (b, kv head, split): all query heads of the group against keys [lo, hi)
                             -> a normalised output and its natural lse per split and head
    _decode_merge_kernel     o = sum_s w_s o_s / sum_s w_s  with  w_s = exp(lse_s - max_s lse_s)

Lengths are read on the device: each split cuts the keys that the band leaves, so a static cache is read only up to
its valid length, and a CUDA graph replays while the length grows. A split with no key writes zeros and lse -inf.

Letters: b batch, h query head, n key, d head dim.
"""

import triton
import triton.language as tl

from attnpatch.kernels.common.primitives import (
    LN2,
    LOG2E,
    apply_mask_tile,
    head_base,
    in_band,
    load_offset,
    load_padding,
    load_rows,
    natural_scores,
    normalised,
    online_softmax,
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


@triton.jit(
    do_not_specialize=["q_offset", "window_left", "window_right", "num_kv_heads", "num_splits", "seqlen_k"]
)
def _decode_split_kernel(
    q,  # [batch, num_heads, 1, HEAD_DIM]
    k,  # [batch, num_kv_heads, seqlen_k, HEAD_DIM]
    v,  # [batch, num_kv_heads, seqlen_k, HEAD_DIM_V]
    attn_mask,  # bool or additive [batch, num_heads, 1, seqlen_k], or None
    key_padding,  # bool [batch, seqlen_k], or None
    q_offset,  # int, or a pointer read with offset_stride
    o,  # [batch, num_heads, num_splits, HEAD_DIM_V], fp32 when there are several splits
    lse,  # fp32 [batch, num_heads, num_splits], or None
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
    o_strides,
    lse_strides,
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
    """Output of a group's heads over one split of the keys."""
    NATURAL: tl.constexpr = attn_mask is not None or softcap is not None

    split = tl.program_id(0) % num_splits
    kv_head = tl.program_id(0) // num_splits
    b, h_kv = kv_head // num_kv_heads, kv_head % num_kv_heads
    offset = load_offset(q_offset, offset_stride, b)
    lo, hi = _split_keys(offset, seqlen_k, window_left, window_right, split, num_splits, BLOCK_N)

    first_head = h_kv * GROUP_SIZE
    scale = LOG2E if NATURAL else sm_scale * LOG2E
    ...
