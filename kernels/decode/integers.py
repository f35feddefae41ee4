"""Integers of 4 bits with a scale and a shift per row and group of channels. Device code.

A channel stands for ``integer * scale + shift``. The tile of a group has one scale and one shift per key, so that
neither meets an element: with ``code = integer - MIDDLE``, of which products are made,

    q . k = scale * (q . code) + (shift + MIDDLE * scale) * sum of q over the group's channels
    p v   = (p * scale) code   + sum over keys of p * (shift + MIDDLE * scale), for every channel of the group

Codes around zero instead of integers from 0 on lose less where p times a scale is rounded to 16 bits.

In words of 16 bits, which hold channels 4c to 4c + 3, each code is ORed into the mantissa of 128 (bfloat16) or 1024
(float16): nibble by nibble, a plane each, two words at a time.
"""

import torch
import triton
import triton.language as tl

from attnpatch.kernels.decode.places import load_scales

INTEGERS = tl.constexpr("integers in bytes")
MIDDLE = tl.constexpr(8)

_BFLOAT16 = """{
.reg .b32 t, one, less;
mov.b32 one, 0x3F803F80; mov.b32 less, 0xC308C308;
lop3.b32 t, $4, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, t, one, less;
shr.u32 t, $4, 4; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $1, t, one, less;
shr.u32 t, $4, 8; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $2, t, one, less;
shr.u32 t, $4, 12; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $3, t, one, less;
}"""

# The upper nibble of a byte is 16 times its integer: 64 + integer after a product with 1/16.
_FLOAT16 = """{
.reg .b32 t, u, part, less, least;
mov.b32 part, 0x2C002C00; mov.b32 less, 0xD480D480; mov.b32 least, 0x64086408;
lop3.b32 t, $4, 0x000F000F, 0x64006400, 0xEA; sub.rn.f16x2 $0, t, least;
lop3.b32 t, $4, 0x00F000F0, 0x64006400, 0xEA; fma.rn.f16x2 $1, t, part, less;
shr.u32 u, $4, 8;
lop3.b32 t, u, 0x000F000F, 0x64006400, 0xEA; sub.rn.f16x2 $2, t, least;
lop3.b32 t, u, 0x00F000F0, 0x64006400, 0xEA; fma.rn.f16x2 $3, t, part, less;
}"""

INTEGER_WORDS = {torch.bfloat16: _BFLOAT16, torch.float16: _FLOAT16}
"""PTX that turns two words ($4) into their first ($0) to last ($3) codes, by dtype."""

IN_BFLOAT16, IN_FLOAT16 = tl.constexpr(_BFLOAT16), tl.constexpr(_FLOAT16)


@triton.jit
def codes_of_bytes(tile, dtype: tl.constexpr):
    """Codes of the lower and of the upper nibbles."""
    return ((tile & 15).to(tl.float32) - MIDDLE).to(dtype), ((tile >> 4).to(tl.float32) - MIDDLE).to(dtype)


@triton.jit
def codes_of_words(tile, PTX: tl.constexpr, dtype: tl.constexpr):
    """Codes of words: four planes."""
    types: tl.constexpr = (tl.int16, tl.int16, tl.int16, tl.int16)
    a, b, c, d = tl.inline_asm_elementwise(PTX, "=&r,=&r,=&r,=&r,r", [tile], types, is_pure=True, pack=2)
    first, second = a.to(dtype, bitcast=True), b.to(dtype, bitcast=True)
    return first, second, c.to(dtype, bitcast=True), d.to(dtype, bitcast=True)


@triton.jit
def sums_of_groups(queries, TILES: tl.constexpr):
    """The sum of each row of q over the channels of each of K's tiles, in fp32: a tuple."""
    out = ()
    PLANES: tl.constexpr = len(queries) // TILES
    for side in tl.static_range(TILES):
        total = tl.sum(queries[side * PLANES].to(tl.float32), axis=1)
        for j in tl.static_range(1, PLANES):
            total += tl.sum(queries[side * PLANES + j].to(tl.float32), axis=1)
        out = out + (total,)
    return out


@triton.jit
def nothing_added(BLOCK_M: tl.constexpr, TILES: tl.constexpr):
    """What is added to all channels of each of V's tiles, before any key: a tuple."""
    out = ()
    for _ in tl.static_range(TILES):
        out = out + (tl.zeros([BLOCK_M], tl.float32),)
    return out


@triton.jit
def load_shifts(
    shift,
    strides,
    side: tl.constexpr,
    scales,
    pages,
    b,
    h,
    first,
    keys,
    stop,
    BY_16: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """What is added to the channels of each key in group ``side``, whose ``scales`` are known."""
    found = load_scales(shift + side * strides[3], strides, pages, b, h, first, keys, stop, BY_16, PAGE_SIZE)
    return found + MIDDLE * scales
