"""Two attentions on different keys as one: each row weighted by its share of the softmax's denominator.

    o = o_1 exp(lse_1 - lse) + o_2 exp(lse_2 - lse),   lse = log(exp lse_1 + exp lse_2 + exp sink)

A program is one row of one head. The largest term is taken out of the exponentials; where a row sees no key, and has
none, 0 stands for it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _row(base, strides, b, h, i, cols, exists):
    """Row i of head h of sequence b, fp32 ``[BLOCK_D]``."""
    start = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1] + i.to(tl.int64) * strides[2]
    return tl.load(base + start + cols * strides[3], mask=exists, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_heads", "seqlen_q"])
def _merge_kernel(
    o,  # [batch, num_heads, seqlen_q, HEAD_DIM_V]
    lse,  # fp32 [batch, num_heads, seqlen_q], contiguous
    other,  # like o
    other_lse,  # like lse
    sinks,  # [num_heads], or None
    merged,  # like o
    merged_lse,  # like lse
    o_strides,
    other_strides,
    merged_strides,
    sinks_stride,
    num_heads,
    seqlen_q,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    b, h, i = row // seqlen_q // num_heads, row // seqlen_q % num_heads, row % seqlen_q
    cols = tl.arange(0, BLOCK_D)
    exists = cols < HEAD_DIM_V
    lse_1, lse_2 = tl.load(lse + row), tl.load(other_lse + row)
    o_1, o_2 = _row(o, o_strides, b, h, i, cols, exists), _row(other, other_strides, b, h, i, cols, exists)

    largest = tl.maximum(lse_1, lse_2)
    is_seen = largest > float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + h * sinks_stride).to(tl.float32)
        largest = tl.maximum(largest, sink)
    largest = tl.where(is_seen, largest, 0.0)
    p_1, p_2 = tl.exp(lse_1 - largest), tl.exp(lse_2 - largest)
    total = p_1 + p_2
    if sinks is not None:
        total += tl.exp(sink - largest)
    total = tl.where(is_seen, total, 1.0)

    target = merged + b.to(tl.int64) * merged_strides[0] + h.to(tl.int64) * merged_strides[1]
    target += i.to(tl.int64) * merged_strides[2] + cols * merged_strides[3]
    tl.store(target, ((o_1 * p_1 + o_2 * p_2) / total).to(merged.dtype.element_ty), mask=exists)
    tl.store(merged_lse + row, tl.where(is_seen, largest + tl.log(total), float("-inf")))
