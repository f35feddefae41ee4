"""Flash-attention forward for Hopper: a warp that loads, and two warpgroups that compute on their own.

As FlashAttention-3 (Shah et al., arXiv 2407.08608): the producer fills a ring of K and V tiles by TMA; each consumer
owns 64 query rows and keeps the tensor cores busy with the other consumer's products while it exponentiates. Programs
stay, one per multiprocessor, and walk a table of tiles that schedule.py balances.

A tile of BLOCK_M query rows sees key blocks from ``start`` to ``stop``, walked from the last to the first:

    start ...... left ........................ right ...... stop
      masked: left    full: every row sees        masked: right edge,
      window edge     every key                   diagonal, end of K

The first block may stop at half of its keys: the upper 64 rows of a causal tile see no more of it.

Products with K run one block ahead of those with V:  s(j) = q k(j)^T,  o += p(j-1) v(j-1),  p(j) = softmax(s(j)).

Rows that see nothing keep m = LOWEST and l = 0; their output is zero.

Packed sequences (cu_seqlens_q) lie one behind the other: a block that runs past the end of a sequence reads rows of the
next one, which the mask hides and ``clean_values`` zeroes, and the last rows of a sequence are stored one by one.

A mask is known here by the bounds of its rows. Tiles of which they do not say everything are left to triton.prefill.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnpatch.kernels.prefill_hopper.eight_bits import plus_values, words
from attnpatch.kernels.prefill_hopper.gluon_names import load_tile, store_wait
from attnpatch.kernels.prefill_hopper.masks import clean_values, hide, key_blocks, row_bounds, tile_range
from attnpatch.kernels.prefill_hopper.places import sequence_of, store_rows, store_whole
from attnpatch.kernels.prefill_hopper.softmax import (
    LN2,
    LOG2E,
    ROWS,
    first_block,
    packed,
    score_scale,
    scores,
    softmax_step,
    thread_sums,
    times_keys,
)

CONSUMERS = gl.constexpr(2)

_WAIT = gl.constexpr(("bar.sync 12, 256; mov.b32 $0, $1;", "bar.sync 13, 256; mov.b32 $0, $1;"))
_PASS = gl.constexpr(("bar.arrive 13, 256; mov.b32 $0, $1;", "bar.arrive 12, 256; mov.b32 $0, $1;"))
"""By consumer: wait for one's turn at a named barrier of the hardware, and give the other its turn."""


@gluon.jit
def _tile(tile):
    """Query block, batch and head of an entry of the table."""
    return tile.to(gl.int32), (tile >> 48).to(gl.int32), (tile >> 32).to(gl.int32) & 0xFFFF


@gluon.jit
def _offset(q_offset, offset_stride, b):
    """Position of query row 0 among the keys; a pointer when ``offset_stride`` is not None."""
    if offset_stride is None:
        return q_offset
    else:
        return gl.load(q_offset + b * offset_stride).to(gl.int32)


@gluon.jit
def _producer(
    q, k, v, buffers, barriers, tiles, num_tiles, whole, packing, GROUP_SIZE: gl.constexpr, BYTES: gl.constexpr
):
    """Load every tile's Q once, and its K and V blocks into the ring."""
    q_s, k_s, v_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    _num_heads, q_offset, offset_stride, _, _, _, _, _, _ = whole
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_N: gl.constexpr = k_s.shape[3]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    count = 0
    tile = gl.load(tiles)
    for i in range(num_tiles):
        m_block, b, h = _tile(tile)
        tile = gl.load(tiles + i + 1)  # long before it is needed
        b, b_q, b_k, row, key, seqlen_q, seqlen_k = sequence_of(b, packing, whole[3], whole[4])
        work = (whole[0], q_offset, offset_stride, seqlen_q, seqlen_k, whole[5], whole[6], whole[7], whole[8])
        offset = _offset(q_offset, offset_stride, b)
        lo, full_lo, full_hi, hi, _end, _joined = tile_range(m_block, b, h, offset, work, BLOCK_M)
        last, num, _right, _left = key_blocks(lo, full_lo, full_hi, hi, BLOCK_N)
        mbarrier.wait(q_empty, (i & 1) ^ 1)
        mbarrier.expect(q_full, BLOCK_M * q_s.shape[4] * BYTES)
        for consumer in gl.static_range(CONSUMERS):
            load_tile(q, [b_q, h, row + m_block * BLOCK_M + consumer * ROWS, 0], q_full, q_s.index(consumer))
        for j in range(num):
            stage = count % STAGES
            phase = ((count // STAGES) & 1) ^ 1
            n = key + (last - j) * BLOCK_N
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), BLOCK_N * k_s.shape[4] * BYTES)
            load_tile(k, [b_k, h // GROUP_SIZE, n, 0], k_full.index(stage), k_s.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v_s.shape[3] * v_s.shape[4] * BYTES)
            at = [b_k, h // GROUP_SIZE, n, 0] if BYTES == 2 else [b_k, h // GROUP_SIZE, 0, n]
            load_tile(v, at, v_full.index(stage), v_s.index(stage))
            count += 1


@gluon.jit
def _operand(p, dtype, LAYOUT: gl.constexpr, BYTES: gl.constexpr):
    """Probabilities as :func:`_plus_values` takes them."""
    if BYTES == 1:
        return words(p)
    else:
        return gl.convert_layout(p.to(dtype), LAYOUT)


@gluon.jit
def _plus_values(acc, p_tile, v_s, stage, BYTES: gl.constexpr):
    """Start ``acc + p v`` of a block of the ring."""
    if BYTES == 1:
        return plus_values(acc, p_tile, v_s, stage)
    else:
        return warpgroup_mma(p_tile, v_s.index(stage).reshape((v_s.shape[3], v_s.shape[4])), acc, is_async=True)


@gluon.jit
def _stop(m, offset, window_right, hi):
    """Keys that the rows of one consumer stop before."""
    if window_right is None:
        return hi
    else:
        return min(hi, m + ROWS + offset + window_right)


@gluon.jit
def _turn(token, ASM: gl.constexpr):
    """Wait for the turn at the tensor cores, or pass it on: one consumer exponentiates while the other multiplies.

    ``token`` keeps the order among the products around it.
    """
    return gl.inline_asm_elementwise(ASM, "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _consumer(
    WHICH: gl.constexpr,
    shared,
    SHARES_Q: gl.constexpr,
    MAY_HOLD_ANYTHING: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BYTES: gl.constexpr,
):
    """Attention of 64 rows of each tile.

    WHICH: of the consumers. shared: what both are given. SHARES_Q: whether the output leaves through the buffer of Q.
    MAY_HOLD_ANYTHING: whether there are keys that no row sees, so that they may be no numbers.
    HEAD_DIM_V: of packed sequences, whose last rows are stored by pointers. BYTES: of an element of q, k and v.
    """
    o, o_rows, lse, buffers, barriers, tiles, num_tiles, whole, packing, terms, row_terms = shared
    q_s, k_s, v_s, o_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    num_heads, q_offset, offset_stride, total_q, total_k, window_left, window_right, _, _ = whole
    sm_scale, softcap, alibi_slopes, slopes_strides, sinks, sinks_strides, scales = terms
    key_bounds, _ = row_terms
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_N: gl.constexpr = k_s.shape[3]
    BLOCK_D: gl.constexpr = k_s.shape[4]
    BLOCK_DV: gl.constexpr = o_s.shape[4]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32 // BYTES])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 32 // BYTES])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    dtype: gl.constexpr = q_s.dtype
    HAS_START: gl.constexpr = window_left is not None or key_bounds is not None
    WAIT: gl.constexpr = _WAIT[WHICH]
    PASS: gl.constexpr = _PASS[WHICH]
    # masked and full blocks in loops of their own; in one where any may be masked, for registers
    RUNS: gl.constexpr = 1 if key_bounds is not None else (3 if HAS_START else 2)

    factor = sm_scale
    scale = score_scale(sm_scale, softcap)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    token = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    if WHICH == 1:
        token = _turn(token, PASS)
    count = 0
    next_tile = gl.load(tiles)
    for i in range(num_tiles):
        m_block, b, h = _tile(next_tile)
        next_tile = gl.load(tiles + i + 1)  # long before it is needed
        m = m_block * BLOCK_M + WHICH * ROWS
        b, b_q, _b_k, row, _key, seqlen_q, seqlen_k = sequence_of(b, packing, total_q, total_k)
        work = (num_heads, q_offset, offset_stride, seqlen_q, seqlen_k, window_left, window_right, whole[7], whole[8])
        offset = _offset(q_offset, offset_stride, b)
        lo, full_lo, full_hi, hi, end, joined = tile_range(m_block, b, h, offset, work, BLOCK_M)
        last, num, right, left = key_blocks(lo, full_lo, full_hi, hi, BLOCK_N)
        tile = (m_block * BLOCK_M, offset, b, h, lo, hi, joined)
        rows = m + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        position = rows + offset
        start, stop = row_bounds(rows, position, b, h, work, row_terms)
        if scales is not None:
            row_blocks = (total_q + BLOCK_M - 1) // BLOCK_M
            factor = sm_scale * gl.load(scales + (b * num_heads + h) * (row_blocks + 1) + m_block)
            scale = score_scale(factor, softcap)
        slope = None
        if alibi_slopes is not None:
            slope = gl.load(alibi_slopes + b * slopes_strides[0] + h * slopes_strides[1]).to(gl.float32)
            slope *= LOG2E / scale

        q_tile = q_s.index(WHICH).reshape((ROWS, BLOCK_D))
        stage = count % STAGES
        mbarrier.wait(q_full, i & 1)
        mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
        k_tile, k_free, first = k_s.index(stage), k_empty.index(stage), last * BLOCK_N
        sight = (position, start, stop)
        if _stop(m, offset, window_right, hi) <= first + BLOCK_N // 2:
            m_i, p = first_block(
                q_tile, k_tile, k_free, first, sight, factor, softcap, slope, BLOCK_N // 2, S_LAYOUT, HAS_START, BYTES
            )
        else:
            m_i, p = first_block(
                q_tile, k_tile, k_free, first, sight, factor, softcap, slope, BLOCK_N, S_LAYOUT, HAS_START, BYTES
            )
        l_i = thread_sums(p)
        p_tile = _operand(p, dtype, P_LAYOUT, BYTES)
        acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, O_LAYOUT)
        count += 1

        starts = (1, right, num - left)
        stops = (num if RUNS == 1 else right, num - left, num)
        for run in gl.static_range(RUNS):
            if RUNS > 1 and BYTES == 2:
                p_tile = packed(p_tile)
            if MAY_HOLD_ANYTHING and run == 1:  # the masked block that the first full one multiplies by
                before = (count - 1) % STAGES
                mbarrier.wait(v_full.index(before), ((count - 1) // STAGES) & 1)
                clean_values(v_s, before, (last - right + 1) * BLOCK_N, tile, work, row_terms, BLOCK_M)
            for j in range(starts[run], stops[run]):
                stage = count % STAGES
                before = (count - 1) % STAGES
                mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
                token = _turn(token, WAIT)
                product = times_keys(q_tile, k_s, stage, zeros)
                mbarrier.wait(v_full.index(before), ((count - 1) // STAGES) & 1)
                if MAY_HOLD_ANYTHING and run != 1:
                    clean_values(v_s, before, (last - j + 1) * BLOCK_N, tile, work, row_terms, BLOCK_M)
                weighted = _plus_values(acc, p_tile, v_s, before, BYTES)
                token = _turn(token, PASS)
                s = warpgroup_mma_wait(1, deps=[product])
                mbarrier.arrive(k_empty.index(stage), count=1)
                keys = (last - j) * BLOCK_N + columns
                s = scores(s, position, keys, factor, softcap, slope)
                if RUNS == 1:
                    if (j < right) | (j >= num - left):
                        s = hide(s, keys, start, stop, HAS_START)
                elif run != 1:
                    s = hide(s, keys, start, stop, HAS_START)
                m_i, alpha, p = softmax_step(s, m_i, scale, BYTES)
                l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None] + thread_sums(p)
                acc = warpgroup_mma_wait(0, deps=[weighted])
                mbarrier.arrive(v_empty.index(before), count=1)
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
                p_tile = _operand(p, dtype, P_LAYOUT, BYTES)
                count += 1

        if not SHARES_Q:
            mbarrier.arrive(q_empty, count=1)
        stage = (count - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((count - 1) // STAGES) & 1)
        if MAY_HOLD_ANYTHING:
            clean_values(v_s, stage, (last - num + 1) * BLOCK_N, tile, work, row_terms, BLOCK_M)
        weighted = _plus_values(acc, p_tile, v_s, stage, BYTES)
        acc = warpgroup_mma_wait(0, deps=[weighted])
        mbarrier.arrive(v_empty.index(stage), count=1)

        l_i = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, S_LAYOUT))
        if softcap is not None:
            m_i -= softcap * LOG2E
        if sinks is not None:
            sink = gl.load(sinks + b * sinks_strides[0] + h * sinks_strides[1]).to(gl.float32) * LOG2E
            m_new = gl.where(l_i > 0.0, gl.maximum(m_i, sink), m_i)  # a row without keys has no sink either
            alpha = gl.exp2(m_i - m_new)
            l_i = gl.where(l_i > 0.0, l_i * alpha + gl.exp2(sink - m_new), 0.0)
            m_i = m_new
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        if lse is not None:
            pointers = lse + (b_q.to(gl.int64) * num_heads + h) * total_q + row + rows
            gl.store(pointers, (m_i + gl.log2(l_i)) * LN2, mask=rows < end)
        inverse = gl.where(l_i > 0.0, 1.0 / l_i, 0.0)
        if scales is not None:
            inverse *= gl.load(scales + (b * num_heads + h) * (row_blocks + 1) + row_blocks)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))[:, None]
        if o_rows is None:
            store_whole(o, o_s.index(WHICH), acc, b_q, h, m, end, SHARES_Q)
        elif m + ROWS <= end:
            store_whole(o, o_s.index(WHICH), acc, b_q, h, row + m, row + end, SHARES_Q)
        else:
            store_rows(o_rows, acc, row + m, h, end - m, num_heads, HEAD_DIM_V)
        if SHARES_Q:
            mbarrier.arrive(q_empty, count=1)
    store_wait(0)


@gluon.jit(
    do_not_specialize=[
        *("q_offset", "window_left", "window_right", "num_heads", "seqlen_q", "seqlen_k", "max_tiles", "batch"),
    ]
)
def _prefill_hopper_kernel(
    q,  # descriptor of [batch, num_heads, seqlen_q, head_dim], blocks [1, 1, 64, BLOCK_D]
    k,  # descriptor of [batch, num_kv_heads, seqlen_k, head_dim], blocks [1, 1, BLOCK_N, BLOCK_D]
    v,  # descriptor of [batch, num_kv_heads, seqlen_k, head_dim_v], blocks [1, 1, BLOCK_N, BLOCK_DV]; 8 bits transposed
    o,  # descriptor of [batch, num_heads, seqlen_q, head_dim_v], blocks [1, 1, 64, BLOCK_DV]
    o_rows,  # the same as a pointer, where sequences are packed, or None
    lse,  # fp32 [batch, num_heads, seqlen_q], contiguous, or None
    sinks,  # [batch, num_heads], or None
    alibi_slopes,  # fp32 [batch, num_heads], or None
    key_bounds,  # int32 [batch, num_heads, seqlen_q, 3], or None
    ranges,  # int32 [batch, num_heads, blocks, 6] of ranges.py, with bounds, or None
    cu_seqlens_q,  # int32 [batch + 1], or None
    cu_seqlens_k,  # likewise
    scales,  # fp32 [batch, num_heads, blocks + 1], of what 8 bits hold: on q.k by tile, and on the output; or None
    tiles,  # int64 [programs, max_tiles + 1]: batch << 48 | head << 32 | query block
    num_tiles,  # int32 [programs]
    q_offset,  # int, or a pointer read with offset_stride
    offset_stride,
    sm_scale,
    softcap,
    window_left,
    window_right,
    sinks_strides,
    slopes_strides,
    bounds_strides,
    ranges_strides,
    num_heads,
    seqlen_q,
    seqlen_k,
    max_tiles,
    batch,  # of packed sequences, or None
    GROUP_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr,
    SHARES_Q: gl.constexpr,
    MAY_HOLD_ANYTHING: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,  # of packed sequences, or None
    BYTES: gl.constexpr,  # of an element of q, k and v
):
    """Output of the tiles of this program."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = q.dtype
    q_s = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, BLOCK_D], q.layout)
    o_s = q_s
    if not SHARES_Q:
        o_s = gl.allocate_shared_memory(o.dtype, [CONSUMERS, 1, 1, ROWS, BLOCK_DV], o.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k.layout)
    V_TILE: gl.constexpr = (BLOCK_N, BLOCK_DV) if BYTES == 2 else (BLOCK_DV, BLOCK_N)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, V_TILE[0], V_TILE[1]], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=CONSUMERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    fence_async_shared()

    own = tiles + gl.program_id(0) * (max_tiles + 1)
    mine = gl.load(num_tiles + gl.program_id(0))
    buffers = (q_s, k_s, v_s, o_s)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    band = (window_left, window_right, ranges, ranges_strides)
    work = (num_heads, q_offset, offset_stride, seqlen_q, seqlen_k, band[0], band[1], band[2], band[3])
    row_terms = (key_bounds, bounds_strides)
    terms = (sm_scale, softcap, alibi_slopes, slopes_strides, sinks, sinks_strides, scales)
    packing = (cu_seqlens_q, cu_seqlens_k, batch)
    shared = (o, o_rows, lse, buffers, barriers, own, mine, work, packing, terms, row_terms)
    gl.warp_specialize(
        [
            (_consumer, (0, shared, SHARES_Q, MAY_HOLD_ANYTHING, HEAD_DIM_V, BYTES)),
            (_consumer, (1, shared, SHARES_Q, MAY_HOLD_ANYTHING, HEAD_DIM_V, BYTES)),
            (_producer, (q, k, v, (q_s, k_s, v_s), barriers, own, mine, work, packing, GROUP_SIZE, BYTES)),
        ],
        [4, 1],
        [240, 24],
    )
