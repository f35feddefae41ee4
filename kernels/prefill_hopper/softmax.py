"""Scores and their running softmax, in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from attnpatch.kernels.prefill_hopper.masks import hide

ROWS = gl.constexpr(64)
"""Query rows of a consumer: the M of a wgmma."""

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

LOWEST = gl.constexpr(-3.0e38)
"""Maximum of a row that has seen no key: finite, so that exp2(-inf - LOWEST) is 0 without a case of its own."""

_RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")
_MOVE = gl.constexpr("mov.b32 $0, $1;")

HEADROOM = gl.constexpr(8.0)
"""Powers of two that probabilities in 8 bits are multiplied by: 256 is below 448, the largest number."""


@gluon.jit
def times_keys(q_tile, k_s, stage, zeros):
    """Start ``q k^T`` of a block of the ring."""
    ROWS_K: gl.constexpr = k_s.shape[3]
    k_tile = k_s.index(stage).reshape((ROWS_K, k_s.shape[4])).permute((1, 0))
    return warpgroup_mma(q_tile, k_tile, zeros, use_acc=False, is_async=True)


@gluon.jit
def score_scale(sm_scale, softcap):
    """From what :func:`scores` returns to powers of two; positive."""
    if softcap is None:
        return sm_scale * LOG2E
    else:
        return 2.0 * LOG2E * softcap


@gluon.jit
def scores(s, position, keys, sm_scale, softcap, slope):
    """Scores in units of :func:`score_scale`; of a softcap, ``(1 + tanh) / 2``, which is theirs shifted by the softcap.

    That is a sigmoid, within 1e-7, which times a softcap is far below what 16 bit rounds off.
    """
    if softcap is not None:
        e = gl.exp2(s * (-2.0 * LOG2E * sm_scale / softcap)) + 1.0
        s = gl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [e], dtype=gl.float32, is_pure=True, pack=1)
    if slope is not None:  # in floats: a conversion per score would cost as much as its exponential
        s -= slope * gl.abs(position.to(gl.float32)[:, None] - keys.to(gl.float32)[None, :])
    return s


@gluon.jit
def softmax_step(s, m_i, scale, BYTES: gl.constexpr):
    """New maximum in powers of two, the factor for what was summed under the old one, and probabilities.

    For 8 bits the maximum is HEADROOM below the largest score, and probabilities reach 256: small ones keep more bits.
    """
    largest = gl.max(s, 1) * scale
    if BYTES == 1:
        largest -= HEADROOM
    m_new = gl.maximum(m_i, largest)
    return m_new, gl.exp2(m_i - m_new), gl.exp2(s * scale - m_new[:, None])


@gluon.jit
def thread_sums(p):
    """``[64, 4]``, per row the columns of one thread: summed up across threads once per tile, not once per block."""
    parts = gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(parts, 3), 1)


@gluon.jit
def packed(p_tile):
    """The same, in pairs per register, as a loop is to carry it: else each block unpacks and packs all of it."""
    return gl.inline_asm_elementwise(_MOVE, "=r,r", [p_tile], dtype=p_tile.dtype, is_pure=True, pack=2)


@gluon.jit
def first_block(
    q_tile,
    k_buffer,  # one stage of the ring, released here
    k_empty,
    first_key,
    sight,  # positions, start and stop of the rows
    sm_scale,
    softcap,
    slope,
    NUM: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    HAS_START: gl.constexpr,
    BYTES: gl.constexpr,
):
    """Maximum and probabilities of a tile's first block, of its first ``NUM`` keys; those of the others are 0."""
    position, start, stop = sight
    ROWS_K: gl.constexpr = k_buffer.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NUM, 32 // BYTES])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    k_tile = k_buffer.reshape((ROWS_K, k_buffer.shape[3])).slice(0, NUM, dim=0).permute((1, 0))
    zeros = gl.zeros([ROWS, NUM], gl.float32, LAYOUT)
    s = warpgroup_mma_wait(0, deps=[warpgroup_mma(q_tile, k_tile, zeros, use_acc=False, is_async=True)])
    mbarrier.arrive(k_empty, count=1)
    keys = first_key + gl.arange(0, NUM, gl.SliceLayout(0, LAYOUT))
    start, stop = gl.convert_layout(start, OF_ROWS), gl.convert_layout(stop, OF_ROWS)
    s = scores(s, gl.convert_layout(position, OF_ROWS), keys, sm_scale, softcap, slope)
    s = hide(s, keys, start, stop, HAS_START)
    nothing = gl.full([ROWS], LOWEST, gl.float32, OF_ROWS)
    m_i, _alpha, p = softmax_step(s, nothing, score_scale(sm_scale, softcap), BYTES)
    if NUM < ROWS_K:
        p = gl.reshape(gl.permute(gl.join(p, gl.zeros_like(p)), (0, 2, 1)), [ROWS, ROWS_K])
    return gl.convert_layout(m_i, gl.SliceLayout(1, S_LAYOUT)), gl.convert_layout(p, S_LAYOUT)
