"""Flash-decode's second kernel: the splits of a row, merged. See kernel.py."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnpatch.kernels.common.hadamard import unrotate
from attnpatch.kernels.common.primitives import head_base, load_per_head, natural_lse, with_sink
from attnpatch.kernels.decode.plan import splits_of_row


@triton.jit
def statistics(partial, num_splits, split_size, HEAD_DIM_V: tl.constexpr):
    """Where maxima and sums lie: behind the outputs of all splits, ``split_size`` elements each."""
    m = partial + tl.cast(num_splits, tl.int64) * split_size
    return m, m + tl.cast(num_splits, tl.int64) * (split_size // HEAD_DIM_V)


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
    V_BLOCKS: tl.constexpr,
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
        gdc_launch_dependents()
    m, l = statistics(partial, num_splits, num_rows.to(tl.int64) * HEAD_DIM_V, HEAD_DIM_V)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    merged = tl.zeros([BLOCK_DV], tl.float32)
    for first in tl.range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        rows = split.to(tl.int64) * num_rows + row
        m_s = tl.load(m + rows, mask=split < splits, other=float("-inf"))
        l_s = tl.load(l + rows, mask=split < splits, other=0.0)
        mask = (split < splits)[:, None] & (cols < HEAD_DIM_V)[None, :]
        o_s = tl.load(partial + rows[:, None] * HEAD_DIM_V + cols[None, :], mask=mask, other=0.0)
        o_s = tl.where((m_s != float("-inf"))[:, None], o_s, 0.0)  # as the load's mask it would wait for m_s
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
    if V_BLOCKS is not None:
        merged = unrotate(merged, V_BLOCKS)
    pointers = head_base(o, o_strides, b_q, h) + i.to(tl.int64) * o_strides[2] + cols.to(tl.int64) * o_strides[3]
    tl.store(pointers, merged.to(o.dtype.element_ty), mask=cols < HEAD_DIM_V)
