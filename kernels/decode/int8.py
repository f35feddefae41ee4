"""Products in int8 of numbers of 16 bits with the levels of codes. Device code.

A number is an upper byte times a unit plus a lower one. Both are columns side by side of the right operand, and what
comes of them is added in int32, exactly: 128 keys * 127 * 104 * 256 fit. Numbers are the queries, with 254 to the upper
byte's unit (queries.py), and p times the norms of values, with 256 to it, where the largest of a row in the tile is
127 units. Other than with p in float16 no number is too small, and no unit is kept from tile to tile.

Keys, and channels of V, are the rows of the left operand: the right one of ``m16n8k32`` has only 8 columns, the bytes
of four queries, where a left one would have 16 rows, twice as many instructions for the same (91 us instead of 104: 8
sequences of 32768 keys, 8 KV heads of 128 with 4 queries each, H200, 2026-11-30).

Of the scores a thread has every eighth key, and of p it packs four neighbours. So K's rows are relabelled before their
products and the scores back behind them, which moves nothing.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(127.0 * 256.0)

# A float32 of 2**23 to 2**24 has a whole number in its lower bits. 128 more make the upper byte round to nearest.
ROUND = tl.constexpr(1.5 * 2.0**23 + 128.0)

_BYTES = tl.constexpr("""{
.reg .b32 t, u;
prmt.b32 t, $2, $3, 0x5140; prmt.b32 u, $4, $5, 0x5140;
prmt.b32 $0, t, u, 0x7632; prmt.b32 u, t, u, 0x5410; xor.b32 $1, u, 0x80808080;
}""")


@triton.jit
def keys_for_products(x):
    """Row 32a + 4g + r of ``x`` ``[keys, columns]`` as row 32a + 8r + g."""
    y = tl.permute(tl.reshape(x, [x.shape[0] // 32, 8, 4, x.shape[1]]), 0, 2, 1, 3)
    return tl.reshape(y, [x.shape[0], x.shape[1]])


@triton.jit
def keys_as_loaded(s):
    """Columns of scores ``[m, keys]``, undoing :func:`keys_for_products`."""
    y = tl.permute(tl.reshape(s, [s.shape[0], s.shape[1] // 32, 4, 8]), 0, 1, 3, 2)
    return tl.reshape(y, [s.shape[0], s.shape[1]])


@triton.jit
def multiply(tile, columns, total):
    """``total``, or None, plus the products of levels ``[n, k]`` with bytes ``[k, 2 m]``: int32 ``[n, 2 m]``."""
    if total is None:
        result = tl.dot(tile, columns, out_dtype=tl.int32)
    else:
        result = tl.dot(tile, columns, total, out_dtype=tl.int32)
    return result


@triton.jit
def whole(total, UNIT: tl.constexpr):
    """What :func:`multiply` gave for upper and lower bytes as one number, ``[m, n]`` in fp32."""
    upper, lower = tl.split(tl.reshape(total, [total.shape[0], total.shape[1] // 2, 2]))
    return (upper * UNIT + lower).to(tl.float32).T


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def bytes_of_weights(weights):
    """Weights ``[m, n]`` >= 0 as bytes ``[n, 2 m]``, and their unit ``[m]``: NaN where one of them is."""
    largest = tl.reduce(weights, 1, _larger_or_nan)
    unit = tl.where(largest == 0.0, 1.0, largest) * (1.0 / LARGEST)
    bits = (weights * (1.0 / unit)[:, None] + ROUND).to(tl.int32, bitcast=True)
    types: tl.constexpr = (tl.int8, tl.int8)
    upper, lower = tl.inline_asm_elementwise(_BYTES, "=&r,=&r,r,r,r,r", [bits], types, is_pure=True, pack=4)
    both = tl.permute(tl.join(upper, lower), 1, 0, 2)
    return tl.reshape(both, [weights.shape[1], 2 * weights.shape[0]]), unit


@triton.jit
def accumulate_int8(acc, alpha, columns, unit, below, above):
    """``acc * alpha + unit * weights (below + above)``: the levels of a plane of V, ``[channels, keys]``."""
    total = multiply(above, columns, multiply(below, columns, None))
    return acc * alpha[:, None] + whole(total, 256) * unit[:, None]
