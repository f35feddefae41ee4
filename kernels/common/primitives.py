"""Small jitted functions with the semantics of AttentionCall; the kernels read like the algorithm because of them.

Conventions: a ``strides`` argument is the tuple of a tensor's strides; an argument that is None compiles the term
away; ``s`` are scores, -inf where hidden; row statistics ``m_i`` (maximum, in powers of two) and ``l_i`` (sum).
"""

import triton
import triton.language as tl

from attnpatch import masking

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
EXCLUDE_AT_OR_BELOW = tl.constexpr(masking.EXCLUDE_AT_OR_BELOW)
FLOAT16_MIN = tl.constexpr(masking.FLOAT16_MIN)


@triton.jit
def head_base(base, strides, b, h):
    """Pointer to element [b, h, 0, 0]; int64 before the multiply, since caches pass 2**31 elements."""
    return base + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def tile_pointers(base, strides, row, col, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Pointers ``[BLOCK_ROWS, BLOCK_COLS]`` to the tile at (row, col) of a head; a loop moves only the scalar part."""
    corner = base + tl.cast(row, tl.int64) * strides[2] + tl.cast(col, tl.int64) * strides[3]
    rows = tl.arange(0, BLOCK_ROWS).to(tl.int64)
    cols = tl.arange(0, BLOCK_COLS).to(tl.int64)
    return corner + (rows[:, None] * strides[2] + cols[None, :] * strides[3])


@triton.jit
def tile_bounds(row, num_rows, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Which elements of a tile exist, ``[1 or BLOCK_ROWS, 1 or BLOCK_COLS]``; all rows where ``num_rows`` is None."""
    inside = tl.full([1, 1], True, tl.int1)
    if num_rows is not None:
        inside = (row + tl.arange(0, BLOCK_ROWS) < num_rows)[:, None]
    if WIDTH != BLOCK_COLS:
        inside = inside & (tl.arange(0, BLOCK_COLS) < WIDTH)[None, :]
    return inside


@triton.jit
def load_rows(x, strides, b, h, row, num_rows, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Rows of head (b, h) as ``[BLOCK_ROWS, BLOCK_COLS]``, zeros past ``num_rows`` and past WIDTH.

    ``x`` is a pointer, or a tensor descriptor of ``[batch, heads, num_rows, WIDTH]`` when ``strides`` is None.
    """
    if strides is None:
        tile = x.load([b, h, row, 0]).reshape(BLOCK_ROWS, BLOCK_COLS)
    else:
        pointers = tile_pointers(head_base(x, strides, b, h), strides, row, 0, BLOCK_ROWS, BLOCK_COLS)
        tile = tl.load(pointers, mask=tile_bounds(row, num_rows, WIDTH, BLOCK_ROWS, BLOCK_COLS), other=0.0)
    return tile


@triton.jit
def store_rows(
    x, strides, b, h, row, num_rows, tile, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    """Store ``tile`` as rows of head (b, h), what lies past ``num_rows`` and WIDTH left out."""
    pointers = tile_pointers(head_base(x, strides, b, h), strides, row, 0, BLOCK_ROWS, BLOCK_COLS)
    inside = tile_bounds(row, num_rows, WIDTH, BLOCK_ROWS, BLOCK_COLS)
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_padding(key_padding, strides, b, keys, inside):
    """Which of ``keys`` are real tokens of sequence b; those not ``inside`` are not read and count as real."""
    pointers = key_padding + b.to(tl.int64) * strides[0] + keys.to(tl.int64) * strides[1]
    return tl.load(pointers, mask=inside, other=1).to(tl.int1)


@triton.jit
def load_bounds(key_bounds, strides, b, h, rows):
    """First key, stop and plainness of ``rows`` of head (b, h), all of which exist."""
    pointers = head_base(key_bounds, strides, b, h) + rows.to(tl.int64) * strides[2]
    return -tl.load(pointers), tl.load(pointers + strides[3]), tl.load(pointers + 2 * strides[3])


@triton.jit
def load_per_head(x, strides, b, h):
    """``x[b, h]`` in fp32, of one head or a block of them that all exist."""
    return tl.load(x + b.to(tl.int64) * strides[0] + h * strides[1]).to(tl.float32)


@triton.jit
def load_offset(q_offset, offset_stride, b):
    """Position of query row 0 among the keys; a pointer when ``offset_stride`` is not None."""
    return q_offset if offset_stride is None else tl.load(q_offset + b * offset_stride).to(tl.int32)


@triton.jit
def in_band(first, last, keys, seqlen_k, window_left, window_right):
    """Whether ``keys`` exist and some query at positions first..last sees them."""
    inside = keys < seqlen_k
    if window_left is not None:
        inside = inside & (keys >= first - window_left)
    if window_right is not None:
        inside = inside & (keys <= last + window_right)
    return inside


@triton.jit
def tanh(x):
    """Tanh that neither overflows for large arguments nor cancels for small."""
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
    saturating = 1.0 - 2.0 / (tl.math.exp2(x * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.3, series, saturating)


@triton.jit
def natural_scores(qk, sm_scale, softcap):
    """``softcap(qk * sm_scale)``."""
    s = qk * sm_scale
    if softcap is not None:
        s = softcap * tanh(s / softcap)
    return s


@triton.jit
def mask_pointers(attn_mask, strides, b, h, rows, keys):
    """Pointers ``[rows, keys]`` to a mask tile; a key's offset is a constant in the instruction, not a register."""
    return head_base(attn_mask, strides, b, h) + rows.to(tl.int64)[:, None] * strides[2] + keys[None, :] * strides[3]


@triton.jit
def apply_mask_tile(s, visible, pointers, inside):
    """Add an additive mask tile to ``s``; and with ``visible`` what a bool or additive tile does not exclude.

    What is not ``inside`` is not read: it hides nothing and adds nothing.
    """
    if pointers.dtype.element_ty == tl.int1:
        visible = visible & (tl.load(pointers, mask=inside, other=1) != 0)
    else:
        bias = tl.load(pointers, mask=inside, other=0).to(tl.float32)
        visible = visible & (bias > EXCLUDE_AT_OR_BELOW) & (bias != FLOAT16_MIN)
        s += bias
    return s, visible


@triton.jit
def online_softmax(s, m_i, l_i, scale, PER_ROW: tl.constexpr = False):
    """Fold a tile of scores into the row statistics; exponents are ``s * scale`` in powers of two, scale > 0.

    Returns:
        p, the factor that rescales what was accumulated before, and the new m_i and l_i.
    """
    scales = scale[:, None] if PER_ROW else scale
    m_new = tl.maximum(m_i, tl.max(s, axis=1) * scale)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key: -inf minus -inf is NaN
    p = tl.math.exp2(s * scales - m_safe[:, None])
    alpha = tl.math.exp2(m_i - m_safe)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, axis=1)


@triton.jit
def products(q_tile, k_tile, PRECISION: tl.constexpr):
    """``q k^T``, ``[m, n]`` in fp32.

    Exact float32 products are summed in four parts of the head dim: one running sum over 64 rounds 1.7 times as much
    as cuBLAS does, four parts as much (H200, 2026-11-29).
    """
    if PRECISION == "ieee" and k_tile.dtype == tl.float32 and q_tile.shape[1] >= 64:
        PART: tl.constexpr = q_tile.shape[1] // 4
        q_parts = q_tile.reshape(q_tile.shape[0], 4, PART).permute(1, 0, 2)
        k_parts = k_tile.reshape(k_tile.shape[0], 4, PART).permute(1, 2, 0)
        return tl.sum(tl.dot(q_parts, k_parts, input_precision=PRECISION), axis=0)
    return tl.dot(q_tile, k_tile.T, input_precision=PRECISION)


@triton.jit
def accumulate(acc, alpha, p, v_tile, PRECISION: tl.constexpr):
    """``acc * alpha + p v``.

    Exact float32 products are summed per tile first, and the fma keeps the compiler from undoing that: one running
    sum over 2000 keys was off by 1.5e-6 of its value (H200, 2026-11-29).
    """
    if PRECISION == "ieee" and v_tile.dtype == tl.float32:
        rescale = tl.broadcast_to(alpha[:, None], acc.shape)
        return tl.math.fma(acc, rescale, tl.dot(p, v_tile, input_precision=PRECISION))
    return tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)


@triton.jit
def with_sink(m_i, l_i, sink):
    """Fold one more score, in natural units and of no value, into the statistics of rows that saw a key.

    Returns:
        The factor that rescales what was accumulated, and the new m_i and l_i.
    """
    seen = m_i != float("-inf")
    top = tl.where(seen, tl.maximum(m_i, sink * LOG2E), 0.0)
    alpha = tl.math.exp2(m_i - top)
    total = l_i * alpha + tl.math.exp2(sink * LOG2E - top)
    return alpha, tl.where(seen, top, float("-inf")), tl.where(seen, total, 0.0)


@triton.jit
def natural_lse(m_i, l_i):
    """Logarithm of the softmax's denominator, -inf for a row that saw no key."""
    return (m_i + tl.math.log2(l_i)) * LN2


@triton.jit
def normalised(acc, l_i):
    """``acc / l_i``, zeros for a row that saw no key; a plain ``/`` may be off by 2 units in the last place."""
    return acc * tl.math.div_rn(1.0, tl.where(l_i == 0.0, 1.0, l_i))[:, None]
