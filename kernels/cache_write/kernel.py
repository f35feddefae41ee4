"""New keys and values into caches, dense or in pages, rounded to 8 bits or to TBQ4 where the caches are.

    program = (b, kv head, BLOCK_T of the new tokens): their vectors of K, then of V

Letters: b batch, h head, t new token, d head dim.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnpatch.kernels.common.encode import encoded
from attnpatch.kernels.common.primitives import head_base


@triton.jit
def _load_positions(positions, strides, b, tokens, exists):
    """Where ``tokens`` of sequence b go, int64, -1 past the last; without strides, one after the other."""
    if strides is None:
        found = tl.load(positions).to(tl.int64) + tokens
    else:
        pointers = positions + b.to(tl.int64) * strides[0] + tokens.to(tl.int64) * strides[1]
        found = tl.load(pointers, mask=exists, other=-1).to(tl.int64)
    return tl.where(exists, found, -1)


@triton.jit
def _load_pages(block_table, strides, b, blocks, inside):
    """The page of each of ``blocks`` of sequence b that is ``inside``, int64, else -1."""
    pointers = block_table + b.to(tl.int64) * strides[0] + blocks * strides[1]
    return tl.load(pointers, mask=inside, other=-1).to(tl.int64)


@triton.jit
def _round_to_even(x):
    """Nearest whole number of an ``|x|`` below 2**22, ties to even: beyond 1.5 * 2**23 only whole numbers exist."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _quantised(x, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """Vectors ``[BLOCK_T, BLOCK_D]`` in 8 bits, of which LIMIT is the largest, and their scales ``[BLOCK_T]``.

    The scale is 1 where a vector is zero. A vector that holds NaN or infinity has scale inf and codes 0, which is NaN.
    """
    x = x.to(tl.float32)
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1)
    scale = tl.math.div_rn(largest, LIMIT)
    scale = tl.where(scale == 0.0, 1.0, scale)
    codes = tl.math.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    codes = tl.where((scale == float("inf"))[:, None], 0.0, codes)
    if dtype == tl.int8:
        codes = _round_to_even(codes)
    return codes.to(dtype), scale


@triton.jit
def _write_vectors(
    x,
    strides,
    cache,
    cache_strides,
    scale,
    scale_strides,
    b,
    h,
    tokens,
    places,
    rows,
    inside,
    LIMIT: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Vectors of ``tokens`` of head h that are ``inside`` to row ``rows`` of sequence or page ``places``."""
    source = head_base(x, strides, b, h) + tokens.to(tl.int64) * strides[2]
    target = head_base(cache, cache_strides, places, h) + rows * cache_strides[2]
    beside = scale
    if scale is not None:
        beside = head_base(scale, scale_strides, places, h) + rows * scale_strides[2]
    if BLOCKS is None:
        _write_rows(source, strides[3], target, cache_strides[3], beside, inside, LIMIT, WIDTH, BLOCK_COLS)
    else:
        _write_blocks(source, strides[3], target, cache_strides[3], beside, scale_strides[3], inside, BLOCKS)


@triton.jit
def _write_rows(
    source,
    stride,
    target,
    target_stride,
    scale,
    inside,
    LIMIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Whole vectors, as they are or in 8 bits, from and to pointers ``[BLOCK_T]``."""
    cols = tl.arange(0, BLOCK_COLS).to(tl.int64)[None, :]
    exists = inside[:, None] & (cols < WIDTH)
    vectors = tl.load(source[:, None] + cols * stride, mask=exists, other=0.0)
    if scale is not None:
        vectors, scales = _quantised(vectors, LIMIT, target.dtype.element_ty)
        tl.store(scale, scales, mask=inside)
    tl.store(target[:, None] + cols * target_stride, vectors, mask=exists)


@triton.jit
def _write_blocks(source, stride, target, target_stride, norm, norm_stride, inside, BLOCKS: tl.constexpr):
    """Vectors in TBQ4, a block of channels after the other, from and to pointers ``[BLOCK_T]``."""
    start = 0
    for i in tl.static_range(len(BLOCKS)):
        channels = start + tl.arange(0, BLOCKS[i]).to(tl.int64)[None, :]
        block = tl.load(source[:, None] + channels * stride, mask=inside[:, None], other=0.0)
        codes, norms = encoded(block)
        bytes = start // 2 + tl.arange(0, BLOCKS[i] // 2).to(tl.int64)[None, :]
        tl.store(target[:, None] + bytes * target_stride, codes, mask=inside[:, None])
        tl.store(norm + i * norm_stride, norms, mask=inside)
        start += BLOCKS[i]


@triton.jit(do_not_specialize=["num_kv_heads", "num_tokens", "capacity", "num_pages", "page_size"])
def _cache_write_kernel(
    k_cache,  # [batch, num_kv_heads, capacity, HEAD_DIM], or pages [num_pages, num_kv_heads, page_size, HEAD_DIM];
    # of TBQ4, half as many bytes
    v_cache,  # the same with HEAD_DIM_V
    k,  # [batch, num_kv_heads, num_tokens, HEAD_DIM]
    v,  # [batch, num_kv_heads, num_tokens, HEAD_DIM_V]
    positions,  # int [batch, num_tokens], or of the first token
    block_table,  # int [batch, capacity / page_size], or None
    k_scale,  # fp32, k_cache's shape without HEAD_DIM; of TBQ4, fp16 with its blocks instead of HEAD_DIM; or None
    v_scale,  # likewise
    k_cache_strides,
    v_cache_strides,
    k_strides,
    v_strides,
    positions_strides,
    table_strides,
    k_scale_strides,
    v_scale_strides,
    num_kv_heads,
    num_tokens,
    capacity,
    num_pages,
    page_size,
    K_LIMIT: tl.constexpr,
    V_LIMIT: tl.constexpr,
    K_BLOCKS: tl.constexpr,
    V_BLOCKS: tl.constexpr,
    RING_FROM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write BLOCK_T tokens of one head, but those whose position lies outside the cache or on no page.

    From row RING_FROM on, unless it is None, the cache is a ring of the last tokens.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    num_blocks = tl.cdiv(num_tokens, BLOCK_T)
    head = tl.program_id(0) // num_blocks
    b, h = head // num_kv_heads, head % num_kv_heads
    tokens = tl.program_id(0) % num_blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = _load_positions(positions, positions_strides, b, tokens, tokens < num_tokens)
    inside = (rows >= 0) & (rows < capacity)
    if RING_FROM is not None:
        in_front = rows < RING_FROM
        size = capacity - RING_FROM
        inside = (rows >= 0) & (in_front | (tokens >= num_tokens - size))
        rows = tl.where(in_front, rows, RING_FROM + (rows - RING_FROM) % size)
    places = b + tl.zeros([BLOCK_T], tl.int64)
    if block_table is not None:
        places = _load_pages(block_table, table_strides, b, rows // page_size, inside)
        rows = rows % page_size
        inside = (places >= 0) & (places < num_pages)
    _write_vectors(
        *(k, k_strides, k_cache, k_cache_strides, k_scale, k_scale_strides),
        *(b, h, tokens, places, rows, inside, K_LIMIT, K_BLOCKS, HEAD_DIM, BLOCK_D),
    )
    _write_vectors(
        *(v, v_strides, v_cache, v_cache_strides, v_scale, v_scale_strides),
        *(b, h, tokens, places, rows, inside, V_LIMIT, V_BLOCKS, HEAD_DIM_V, BLOCK_DV),
    )
