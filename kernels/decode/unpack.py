"""How keys and values of 8 bits lie in a tile, and as 16 bit floats, without a conversion instruction.

A tile is loaded as 16 bit words that hold elements 2c and 2c + 1 of a row. So loads, and the transposed reads that a
product with V needs, are those of 16 bit elements, and both halves of every word come out as tiles of their own:
products with K are the sum over both, those with V two accumulators. Two words are unpacked at a time.

A float of 8 bits, moved to where a wider format has its sign, exponent and mantissa, is the same number but for the
exponents' biases: one product by a power of two, subnormals included. (It reads NaN, and the infinities of e5m2, as
what their bits would mean otherwise: 480 for e4m3.) An int8 is ORed into the mantissa of 128 (bfloat16) or 1024
(float16), which is then subtracted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnpatch.attention_call import PACKED, SCALES, AttentionCall, width_of
from attnpatch.kernels.common.support import padded_width
from attnpatch.kernels.decode.codes import BYTES, INT8_ROWS, INT8_WORDS, WORDS, levels_of_bytes, levels_of_words
from attnpatch.kernels.decode.integers import (
    IN_BFLOAT16,
    IN_FLOAT16,
    INTEGER_WORDS,
    INTEGERS,
    codes_of_bytes,
    codes_of_words,
)

_FLOAT = """{{
.reg .b32 t, u, c, z;
mov.b32 c, {factor}; mov.b32 z, 0x80008000;
shl.b32 t, $2, 8; and.b32 t, t, 0x80008000;
shl.b32 u, $2, {shift}; lop3.b32 u, u, {mask}, t, 0xEA;
fma.rn.{type} $0, u, c, z;
and.b32 t, $2, 0x80008000;
shr.u32 u, $2, {back}; lop3.b32 u, u, {mask}, t, 0xEA;
fma.rn.{type} $1, u, c, z;
}}"""

_INT8_BFLOAT16 = """{
.reg .b32 t, a, c, n;
mov.b32 n, 0xBF80BF80;
lop3.b32 a, $2, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 c, $2, 0x00800080, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, c, n, a;
shr.u32 t, $2, 8;
lop3.b32 a, t, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 c, t, 0x00800080, 0x43004300, 0xEA;
fma.rn.bf16x2 $1, c, n, a;
}"""

_INT8_FLOAT16 = """{
.reg .b32 t, a, c;
mov.b32 c, 0x64806480;
lop3.b32 a, $2, 0x00FF00FF, c, 0x6A;
sub.rn.f16x2 $0, a, c;
shr.u32 t, $2, 8;
lop3.b32 a, t, 0x00FF00FF, c, 0x6A;
sub.rn.f16x2 $1, a, c;
}"""


class _Float(NamedTuple):
    """How far the bits of exponent and mantissa move, which they are then, and 2 to the difference of the biases."""

    shift: int
    mask: str
    factor: str


_FLOATS = {
    (torch.float8_e4m3fn, torch.bfloat16): _Float(4, "0x07F007F0", "0x7B807B80"),
    (torch.float8_e5m2, torch.bfloat16): _Float(5, "0x0FE00FE0", "0x77807780"),
    (torch.float8_e4m3fn, torch.float16): _Float(7, "0x3F803F80", "0x5C005C00"),
    (torch.float8_e5m2, torch.float16): _Float(8, "0x7F007F00", "0x3C003C00"),
}
_TYPES = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}

UNPACKING = {
    (torch.int8, torch.bfloat16): _INT8_BFLOAT16,
    (torch.int8, torch.float16): _INT8_FLOAT16,
    **{
        (narrow, wide): _FLOAT.format(**x._asdict(), back=8 - x.shift, type=_TYPES[wide])
        for (narrow, wide), x in _FLOATS.items()
    },
}
"""PTX that turns two words ($2) into both numbers' low elements ($0) and high elements ($1), by dtypes."""

MIN_COLUMNS = 16
"""The narrowest product of 16 bit floats."""

MIN_WIDTH = 2 * MIN_COLUMNS
"""Of the two planes of a tile of 8 bits."""


class Form(NamedTuple):
    """How K or V is loaded and what its tiles are made of.

    Args:
        unpack: what :func:`planes` makes of a loaded tile: None, PTX of UNPACKING or INTEGER_WORDS, or a name of
            codes.py or integers.py.
        strides: in the elements that are loaded.
        step: channels per loaded element, so tiles of a step-th of the width each.
        tiles: loaded tiles side by side, of which each has a scale of its own.
        aligned: whether all rows of codes in words begin at multiples of 16 bytes.
    """

    unpack: str | None
    strides: tuple[int, ...]
    step: int = 1
    tiles: int = 1
    aligned: bool = False


def forms_of(call: AttentionCall, alignment: int, block_m: int) -> list[Form]:
    """The forms of K and V; arguments as of :func:`form_of`. Codes are in words on both sides or on none."""
    sides = (call.k, call.k_shift), (call.v, call.v_shift)
    forms = [form_of(x, call.q.dtype, alignment, block_m, shift) for x, shift in sides]
    if any(form.unpack == BYTES.value for form in forms):
        forms = [form_of(x, call.q.dtype, 1, block_m, shift) for x, shift in sides]
    return forms


def form_of(x: Tensor, dtype: torch.dtype, alignment: int, block_m: int, shift: Tensor | None = None) -> Form:
    """The form of K or V.

    Args:
        x: K or V, ``[.., .., .., head_dim]``.
        dtype: q's.
        alignment: of its address, in bytes: 16, 2 or 1.
        block_m: rows of a tile of q.
        shift: of integers of 4 bits.
    """
    whole = x.is_cuda and x.stride(3) == 1 and all(n % 2 == 0 for n in (alignment, x.shape[3], *x.stride()[:3]))
    words = (*(stride // 2 for stride in x.stride()[:2]), tl.constexpr(x.stride(2) // 2), 1)
    if shift is not None:
        return _integers(x, dtype, words if whole else None, alignment, shift.shape[3])
    if x.dtype == PACKED:
        return _codes(x, dtype, words if whole else None, alignment, block_m)
    ptx = UNPACKING.get((x.dtype, dtype))
    return Form(ptx, words, 2) if ptx and whole and x.shape[3] >= MIN_WIDTH else Form(None, x.stride())


def _codes(x: Tensor, dtype: torch.dtype, words: tuple[int, ...] | None, alignment: int, block_m: int) -> Form:
    """TBQ4 codes: in words where all blocks are of 64 or of 128 channels, else in bytes."""
    width = width_of(x)
    if words is None or dtype == torch.float32 or width not in (64, 128, 256):
        return Form(BYTES.value, x.stride(), 2)
    aligned = all(n % 16 == 0 for n in (alignment, *x.stride()[:3]))
    return Form((INT8_WORDS if block_m <= INT8_ROWS else WORDS).value, words, 4, max(1, width // 128), aligned)


def _integers(x: Tensor, dtype: torch.dtype, words: tuple[int, ...] | None, alignment: int, groups: int) -> Form:
    """Integers of 4 bits, a tile per group, of which columns are idle where it is narrower than products."""
    if words is None or dtype not in INTEGER_WORDS or width_of(x) // groups % 4:
        return Form(INTEGERS.value, x.stride(), 2, groups)
    aligned = all(n % 16 == 0 for n in (alignment, *x.stride()[:3], x.shape[3] // groups))
    return Form(INTEGER_WORDS[dtype], words, 4, groups, aligned)


def unpacks_alike(call: AttentionCall) -> bool:
    """Whether K and V are as wide, and the planes that both unpack into: products of 64 rows are right then.

    The ptxas of Triton 3.6 otherwise adds to uniform registers that it never set, where it works out the descriptors
    of V's first plane: even columns came out wrong (K of 128, V of 64 channels in int8), or an address was out of
    bounds (K in int8, V in codes or in integers of 4 bits; H200, 2026-11-30 and 2026-12-01).
    """
    sides = (call.k, call.k_shift), (call.v, call.v_shift)
    kinds = {(x.dtype == PACKED, shift is not None and shift.shape[3]) for x, shift in sides if x.dtype.itemsize == 1}
    return len(kinds) < 2 and padded_width(call.head_dim) == padded_width(call.head_dim_v)


def is_per_head(scale: Tensor | None, paged: bool) -> bool:
    """Whether all keys of a head share one scale."""
    return scale is not None and scale.dim() == 3 and scale.stride(2) == 0 and (not paged or scale.stride(0) == 0)


def has_whole_norms(call: AttentionCall) -> bool:
    """Whether sixteen norms, from a multiple of 16 on, can be read where one of them is wanted.

    Loads of 4 bytes and more are asynchronous; to know that a tile of norms consists of them, the compiler must know
    that their mask changes at such multiples only.
    """
    sides = [x for name in SCALES if (x := getattr(call, name)) is not None and x.dim() == 4]
    whole = all(x.stride(2) == 1 and all(n % 16 == 0 for n in (*x.stride()[:2], x.shape[2])) for x in sides)
    return bool(sides) and whole and call.block_table is None and call.cu_seqlens_k is None


@triton.jit
def pointer_of(x, UNPACK: tl.constexpr):
    """To what K or V is loaded as: words of 16 bits, or its elements."""
    if UNPACK is None or UNPACK == BYTES or UNPACK == INTEGERS:
        pointer = x
    else:
        pointer = x.to(tl.pointer_type(tl.int16), bitcast=True)
    return pointer


@triton.jit
def planes(tile, UNPACK: tl.constexpr, IS_KEY: tl.constexpr, dtype: tl.constexpr):
    """The tiles that a loaded tile is made of, as floats that products take: a tuple.

    Of 8 bits in words: the low elements, and the high ones.
    """
    if UNPACK is None:
        out = (tile.to(dtype),)
    elif UNPACK == BYTES:
        out = levels_of_bytes(tile, dtype)
    elif UNPACK == INTEGERS:
        out = codes_of_bytes(tile, dtype)
    elif UNPACK == IN_BFLOAT16 or UNPACK == IN_FLOAT16:
        out = codes_of_words(tile, UNPACK, dtype)
    elif UNPACK == WORDS or UNPACK == INT8_WORDS:
        out = levels_of_words(tile, UNPACK == INT8_WORDS, IS_KEY)
    else:
        types: tl.constexpr = (tl.int16, tl.int16)
        low, high = tl.inline_asm_elementwise(UNPACK, "=r,=r,r", [tile], dtype=types, is_pure=True, pack=2)
        out = (low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))
    return out
