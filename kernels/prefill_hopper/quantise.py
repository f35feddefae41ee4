"""Q, K and V of a call in 8 bit floats (e4m3), with a scale per head, as prefill_hopper multiplies them.

Two kernels over the same blocks of BLOCK rows, those of Q first, then K's, then V's: the largest number of each block;
then, from the largest of all blocks of a head, its scale ``largest / 448`` and its numbers divided by that.

V is written transposed, keys as neighbours, since products in 8 bits read both operands so. Of each 16 keys the order
is that in which a thread holds its probabilities (``softmax.operand``): position 4 q + 2 a + e holds key 8 a + 2 q + e.

Keys that no row of the call sees may be no numbers, as behind the end of a cache: they count in no scale, and zeros are
written for them, as for those that fill the last block of V.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
"""Of e4m3."""

SMALLEST = tl.constexpr(1e-15)
"""A head whose numbers are all smaller is scaled as if this were its largest: the product of two scales is no zero."""


@triton.jit
def _offset(q_offset, offset_stride, b):
    if offset_stride is None:
        return q_offset
    else:
        return tl.load(q_offset + b * offset_stride).to(tl.int32)


@triton.jit
def _seen(b, q_offset, offset_stride, seqlen_q, seqlen_k, window_left, window_right):
    """First key and stop of what the rows of a sequence see."""
    first, stop = 0, seqlen_k
    offset = _offset(q_offset, offset_stride, b)
    if window_left is not None:
        first = tl.maximum(offset - window_left, 0)
    if window_right is not None:
        stop = tl.minimum(offset + seqlen_q + window_right, seqlen_k)
    return first, stop


@triton.jit
def _numbers(x, x_strides, b, h, rows, first, stop, WIDTH: tl.constexpr):
    """Rows of a head in float32, zeros outside of ``first <= row < stop``."""
    columns = tl.arange(0, WIDTH)
    pointers = x + b.to(tl.int64) * x_strides[0] + h.to(tl.int64) * x_strides[1]
    pointers += rows.to(tl.int64)[:, None] * x_strides[2] + columns[None, :] * x_strides[3]
    return tl.load(pointers, mask=((rows >= first) & (rows < stop))[:, None], other=0.0).to(tl.float32)


@triton.jit
def _block(i, num_heads, blocks):
    """Batch, head and block of the ``i``-th."""
    return i // blocks // num_heads, i // blocks % num_heads, i % blocks


@triton.jit(do_not_specialize=["q_offset", "seqlen_q", "seqlen_k", "window_left", "window_right", "batch"])
def _largest_kernel(
    q,
    k,
    v,
    q_offset,
    largest,  # fp32 [programs]
    q_strides,
    k_strides,
    v_strides,
    offset_stride,
    window_left,
    window_right,
    batch,
    num_heads,
    num_kv_heads,
    seqlen_q,
    seqlen_k,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest number of each block."""
    i = tl.program_id(0)
    q_blocks, k_blocks = tl.cdiv(seqlen_q, BLOCK), tl.cdiv(seqlen_k, BLOCK)
    of_q, of_k = batch * num_heads * q_blocks, batch * num_kv_heads * k_blocks
    in_block = tl.arange(0, BLOCK)
    if i < of_q:
        b, h, block = _block(i, num_heads, q_blocks)
        x = _numbers(q, q_strides, b, h, block * BLOCK + in_block, 0, seqlen_q, HEAD_DIM)
    else:
        b, h, block = _block((i - of_q) % of_k, num_kv_heads, k_blocks)
        rows = block * BLOCK + in_block
        first, stop = _seen(b, q_offset, offset_stride, seqlen_q, seqlen_k, window_left, window_right)
        if i < of_q + of_k:
            x = _numbers(k, k_strides, b, h, rows, first, stop, HEAD_DIM)
        else:
            x = _numbers(v, v_strides, b, h, rows, first, stop, HEAD_DIM)
    tl.store(largest + i, tl.max(tl.where(x == x, tl.abs(x), 0.0)))  # NaN reaches the rows that see it, no other


@triton.jit
def _scale(largest, first, blocks, WIDTH: tl.constexpr):
    """Of the head whose blocks begin with the one numbered ``first``."""
    found = tl.zeros([WIDTH], tl.float32)
    for start in range(0, blocks, WIDTH):
        more = start + tl.arange(0, WIDTH)
        found = tl.maximum(found, tl.load(largest + first + more, mask=more < blocks, other=0.0))
    return tl.maximum(tl.max(found), SMALLEST) / LARGEST


@triton.jit
def _store(x, scale, pointers, mask):
    tl.store(pointers, (x * (1.0 / scale)).to(tl.float8e4nv), mask=mask)


@triton.jit(do_not_specialize=["q_offset", "seqlen_q", "seqlen_k", "window_left", "window_right", "batch"])
def _quantise_kernel(
    q,
    k,
    v,
    q_offset,
    largest,  # fp32 [programs]
    q8,  # [batch, num_heads, seqlen_q, HEAD_DIM], contiguous
    k8,  # [batch, num_kv_heads, seqlen_k, HEAD_DIM], contiguous
    v8,  # [batch, num_kv_heads, HEAD_DIM, blocks * BLOCK], contiguous
    scales,  # fp32 [batch, num_heads, 2]: on q.k and on the output
    q_strides,
    k_strides,
    v_strides,
    offset_stride,
    window_left,
    window_right,
    batch,
    num_heads,
    num_kv_heads,
    seqlen_q,
    seqlen_k,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each block in 8 bits."""
    i = tl.program_id(0)
    q_blocks, k_blocks = tl.cdiv(seqlen_q, BLOCK), tl.cdiv(seqlen_k, BLOCK)
    of_q, of_k = batch * num_heads * q_blocks, batch * num_kv_heads * k_blocks
    in_block, columns = tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
    if i < of_q:
        b, h, block = _block(i, num_heads, q_blocks)
        rows = block * BLOCK + in_block
        scale = _scale(largest, i - block, q_blocks, BLOCK)
        if block == 0:
            of_kv = (b * num_kv_heads + h // (num_heads // num_kv_heads)) * k_blocks
            k_scale = _scale(largest, of_q + of_kv, k_blocks, BLOCK)
            v_scale = _scale(largest, of_q + of_k + of_kv, k_blocks, BLOCK)
            tl.store(scales + (b * num_heads + h) * 2, scale * k_scale)
            tl.store(scales + (b * num_heads + h) * 2 + 1, v_scale)
        x = _numbers(q, q_strides, b, h, rows, 0, seqlen_q, HEAD_DIM)
        row = (b * num_heads + h).to(tl.int64) * seqlen_q + rows
        _store(x, scale, q8 + row[:, None] * HEAD_DIM + columns[None, :], (rows < seqlen_q)[:, None])
    else:
        b, h, block = _block((i - of_q) % of_k, num_kv_heads, k_blocks)
        scale = _scale(largest, i - block, k_blocks, BLOCK)
        first, stop = _seen(b, q_offset, offset_stride, seqlen_q, seqlen_k, window_left, window_right)
        head = (b * num_kv_heads + h).to(tl.int64)
        if i < of_q + of_k:
            rows = block * BLOCK + in_block
            x = _numbers(k, k_strides, b, h, rows, first, stop, HEAD_DIM)
            row = head * seqlen_k + rows
            _store(x, scale, k8 + row[:, None] * HEAD_DIM + columns[None, :], (rows < seqlen_k)[:, None])
        else:
            rows = block * BLOCK + in_block // 16 * 16 + in_block % 4 // 2 * 8 + in_block % 16 // 4 * 2 + in_block % 2
            values = tl.trans(_numbers(v, v_strides, b, h, rows, first, stop, HEAD_DIM))
            channel = head * HEAD_DIM + columns
            places = channel[:, None] * (k_blocks * BLOCK) + (block * BLOCK + in_block)[None, :]
            _store(values, scale, v8 + places, tl.full([HEAD_DIM, BLOCK], True, tl.int1))
