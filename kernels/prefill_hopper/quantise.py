"""Q, K and V of a call in 8 bit floats (e4m3), as prefill_hopper multiplies them.

K and V have a scale per head, Q one per BLOCK rows of a head, which are a tile. Where there are bounds a kernel finds
the keys that some row sees. Then one finds the largest number of each block of BLOCK rows, those of K first, then V's.
The last rounds: a scale is ``largest / 448``, the largest of all blocks of a head of K or V, of a block of Q alone,
which is so read once.

V is written transposed, keys as neighbours, since products in 8 bits read both operands so. Of each 16 keys the order
is that in which a thread holds its probabilities (``softmax.operand``): position 4 q + 2 a + e holds key 8 a + 2 q + e.

Keys that no row of the call sees may be no numbers, as behind the end of a cache: they count in no scale, and zeros are
written for them, as for those that fill the last block of V.
"""

import triton
import triton.language as tl

from attnpatch.kernels.common.primitives import load_bounds, load_offset, load_padding

LARGEST = tl.constexpr(448.0)
"""Of e4m3."""

SMALLEST = tl.constexpr(1e-15)
"""A head whose numbers are all smaller is scaled as if this were its largest: the product of two scales is no zero."""


@triton.jit
def _live(seen, b, keys, q_offset, offset_stride, seqlen_q, seqlen_k, window_left, window_right):
    """Which keys some row of a sequence sees: by the table, else by the band."""
    if seen is not None:
        return tl.load(seen + b.to(tl.int64) * seqlen_k + keys, mask=keys < seqlen_k, other=0) != 0
    else:
        offset = load_offset(q_offset, offset_stride, b)
        live = keys < seqlen_k
        if window_left is not None:
            live = live & (keys >= offset - window_left)
        if window_right is not None:
            live = live & (keys < offset + seqlen_q + window_right)
        return live


@triton.jit
def _numbers(x, x_strides, b, h, rows, live, WIDTH: tl.constexpr):
    """Rows of a head in float32, zeros where they are not ``live``."""
    columns = tl.arange(0, WIDTH)
    pointers = x + b.to(tl.int64) * x_strides[0] + h.to(tl.int64) * x_strides[1]
    pointers += rows.to(tl.int64)[:, None] * x_strides[2] + columns[None, :] * x_strides[3]
    return tl.load(pointers, mask=live[:, None], other=0.0).to(tl.float32)


@triton.jit
def _block(i, num_heads, blocks):
    """Batch, head and block of the ``i``-th."""
    return i // blocks // num_heads, i // blocks % num_heads, i % blocks


@triton.jit(do_not_specialize=["q_offset", "seqlen_q", "seqlen_k", "window_left", "window_right"])
def _seen_kernel(
    key_bounds,  # int32 [batch, heads, seqlen_q, 3]
    key_padding,  # bool [batch, seqlen_k], or None
    q_offset,
    seen,  # int8 [batch, seqlen_k], contiguous
    bounds_strides,
    padding_strides,
    offset_stride,
    window_left,
    window_right,
    heads,  # whose bounds differ
    seqlen_q,
    seqlen_k,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Whether some row of a sequence sees a key, of KEYS keys. Those that attn_mask alone hides count as seen."""
    blocks = tl.cdiv(seqlen_k, KEYS)
    b, keys = tl.program_id(0) // blocks, tl.program_id(0) % blocks * KEYS + tl.arange(0, KEYS)
    offset = load_offset(q_offset, offset_stride, b)
    found = tl.zeros([KEYS], tl.int32)
    for first in range(0, heads * seqlen_q, ROWS):
        i = tl.minimum(first + tl.arange(0, ROWS), heads * seqlen_q - 1)
        rows = i % seqlen_q
        start, stop, _plain = load_bounds(key_bounds, bounds_strides, b, i // seqlen_q, rows)
        if window_left is not None:
            start = tl.maximum(start, rows + offset - window_left)
        if window_right is not None:
            stop = tl.minimum(stop, rows + offset + window_right + 1)
        sees = (keys[:, None] >= start[None, :]) & (keys[:, None] < stop[None, :])
        found = tl.maximum(found, tl.max(sees.to(tl.int32), 1))
    inside = keys < seqlen_k
    if key_padding is not None:
        found = tl.where(load_padding(key_padding, padding_strides, b, keys, inside), found, 0)
    tl.store(seen + b.to(tl.int64) * seqlen_k + keys, found.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["q_offset", "seqlen_q", "seqlen_k", "window_left", "window_right", "batch"])
def _largest_kernel(
    k,
    v,
    q_offset,
    seen,  # int8 [batch, seqlen_k] of _seen_kernel, or None
    largest,  # fp32 [programs], of K, then of V
    k_strides,
    v_strides,
    offset_stride,
    window_left,
    window_right,
    batch,
    num_kv_heads,
    seqlen_q,
    seqlen_k,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest number of each block."""
    i = tl.program_id(0)
    k_blocks = tl.cdiv(seqlen_k, BLOCK)
    of_k = batch * num_kv_heads * k_blocks
    b, h, block = _block(i % of_k, num_kv_heads, k_blocks)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    live = _live(seen, b, rows, q_offset, offset_stride, seqlen_q, seqlen_k, window_left, window_right)
    if i < of_k:
        x = _numbers(k, k_strides, b, h, rows, live, HEAD_DIM)
    else:
        x = _numbers(v, v_strides, b, h, rows, live, HEAD_DIM)
    tl.store(largest + i, _largest(x))


@triton.jit
def _largest(x):
    """NaN is left out: it reaches the rows that see it, no other."""
    return tl.max(tl.where(x == x, tl.abs(x), 0.0))


@triton.jit
def _scale(largest):
    return tl.maximum(largest, SMALLEST) / LARGEST


@triton.jit
def _head_scale(largest, first, blocks, WIDTH: tl.constexpr):
    """Of the head whose blocks begin with the one numbered ``first``."""
    found = tl.zeros([WIDTH], tl.float32)
    for start in range(0, blocks, WIDTH):
        more = start + tl.arange(0, WIDTH)
        found = tl.maximum(found, tl.load(largest + first + more, mask=more < blocks, other=0.0))
    return _scale(tl.max(found))


@triton.jit
def _store(x, scale, pointers, mask):
    tl.store(pointers, (x * (1.0 / scale)).to(tl.float8e4nv), mask=mask)


@triton.jit(do_not_specialize=["q_offset", "seqlen_q", "seqlen_k", "window_left", "window_right", "batch"])
def _quantise_kernel(
    q,
    k,
    v,
    q_offset,
    seen,  # int8 [batch, seqlen_k] of _seen_kernel, or None
    largest,  # fp32, of each block of K, then of V
    q8,  # [batch, num_heads, seqlen_q, HEAD_DIM], contiguous
    k8,  # [batch, num_kv_heads, seqlen_k, HEAD_DIM], contiguous
    v8,  # [batch, num_kv_heads, HEAD_DIM, blocks * BLOCK], contiguous
    scales,  # fp32 [batch, num_heads, q_blocks + 1]: on q.k of each block of rows, and on the output
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
        x = _numbers(q, q_strides, b, h, rows, rows < seqlen_q, HEAD_DIM)
        scale = _scale(_largest(x))
        of_kv = (b * num_kv_heads + h // (num_heads // num_kv_heads)) * k_blocks
        of_head = scales + (b * num_heads + h) * (q_blocks + 1)
        tl.store(of_head + block, scale * _head_scale(largest, of_kv, k_blocks, BLOCK))
        if block == 0:
            tl.store(of_head + q_blocks, _head_scale(largest, of_k + of_kv, k_blocks, BLOCK))
        row = (b * num_heads + h).to(tl.int64) * seqlen_q + rows
        _store(x, scale, q8 + row[:, None] * HEAD_DIM + columns[None, :], (rows < seqlen_q)[:, None])
    else:
        b, h, block = _block((i - of_q) % of_k, num_kv_heads, k_blocks)
        scale = _head_scale(largest, i - of_q - block, k_blocks, BLOCK)
        head = (b * num_kv_heads + h).to(tl.int64)
        of_v = i >= of_q + of_k
        rows = block * BLOCK + in_block
        if of_v:
            rows = block * BLOCK + in_block // 16 * 16 + in_block % 4 // 2 * 8 + in_block % 16 // 4 * 2 + in_block % 2
        live = _live(seen, b, rows, q_offset, offset_stride, seqlen_q, seqlen_k, window_left, window_right)
        if of_v:
            values = tl.trans(_numbers(v, v_strides, b, h, rows, live, HEAD_DIM))
            channel = head * HEAD_DIM + columns
            places = channel[:, None] * (k_blocks * BLOCK) + (block * BLOCK + in_block)[None, :]
            _store(values, scale, v8 + places, tl.full([HEAD_DIM, BLOCK], True, tl.int1))
        else:
            x = _numbers(k, k_strides, b, h, rows, live, HEAD_DIM)
            row = head * seqlen_k + rows
            _store(x, scale, k8 + row[:, None] * HEAD_DIM + columns[None, :], (rows < seqlen_k)[:, None])
