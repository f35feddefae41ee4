"""TBQ4 blocks encoded in registers, as :func:`attnpatch.tbq4.encode` does it. Device code.

All in float32, and the rotation by additions alone, so the codes are those of the reference but where a channel lies
within rounding of the boundary of two levels.
"""

import triton
import triton.language as tl

from attnpatch.kernels.common.hadamard import SIGNS_IN, SIGNS_OUT, sign
from attnpatch.tbq4 import codec

BOUNDARIES = tl.constexpr(codec.BOUNDARIES)
LEVELS = tl.constexpr(codec.LEVELS)
SHORTEST = tl.constexpr(codec.SHORTEST)
LONGEST = tl.constexpr(codec.LONGEST)
ONE_OVER_STEP = tl.constexpr(1 / codec.STEP)
PAST_FLOAT16 = tl.constexpr(65520.0)


@triton.jit
def encoded(x):
    """Codes, uint8 ``[rows, n // 2]``, and norms, float16 ``[rows]``, of blocks ``[rows, n]``."""
    x = x.to(tl.float32)
    length = tl.math.sqrt_rn(tl.sum(x * x, axis=1))
    usable = (length > SHORTEST) & (length < LONGEST)
    units = tl.math.div_rn(x, tl.broadcast_to(tl.where(usable, length, 1.0)[:, None], x.shape))
    codes, levels = _quantised(_rotated(tl.where(usable[:, None], units, 0.0)))
    of_levels = tl.math.sqrt_rn(tl.sum(levels * levels, axis=1).to(tl.float32))  # a whole number below 2**24 of them
    norm = tl.math.div_rn(length, of_levels) * ONE_OVER_STEP
    norm = tl.where(norm < PAST_FLOAT16, norm, float("nan")).to(tl.float16)
    low, high = _pairs(codes)
    return (low | (high << 4)).to(tl.uint8), norm


@triton.jit
def _quantised(y):
    """Codes of rotated blocks of variance 1 and their levels, int32: a channel on a boundary goes up."""
    codes = tl.zeros(y.shape, tl.int32)
    levels = tl.full(y.shape, LEVELS[0], tl.int32)
    for i in tl.static_range(15):
        above = y >= BOUNDARIES[i]
        codes += above.to(tl.int32)
        levels = tl.where(above, LEVELS[i + 1], levels)
    return codes, levels


@triton.jit
def _rotated(x):
    """``s2 * (H (s1 * x))`` of blocks ``[rows, n]``: sums and differences of neighbours, log2(n) times."""
    ROWS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    channels = tl.arange(0, N)[None, :]
    y = x * sign(channels, SIGNS_IN)
    for i in tl.static_range(7):
        if N >> i > 1:
            low, high = _pairs(y)
            y = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), [ROWS, N])
    return y * sign(channels, SIGNS_OUT)


@triton.jit
def _pairs(x):
    """Even and odd columns."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
