"""TBQ4 codes as numbers that products take. Device code.

A byte holds the codes of channels 2b and 2b + 1; a word of 16 bits those of 4c to 4c + 3. Scores are products with a
rotated query, and outputs are rotated back by the merge, so that nothing of a rotation is left here; norms multiply
scores and probabilities.

In words, two byte permutes look eight codes up: one in the table of the levels below zero and one in that of those
above, by the lower three bits of four codes; the fourth bits choose. As float16 the level, as a byte 128 + level, is
put into the mantissa of 1024, from which 1152 is taken.

Up to eight rows have their products in int8 (int8.py), which takes twice as many per instruction. A level is then the
sum of two products: ``prmt`` copies a sign where bit 3 of a selector is set, so that the table of levels below zero
gives -1 for those above, and the other one, of level + 1, gives 0 for those below. No masks.

Table constants are XORed with a register that holds 0 (the index of a grid's axis 1): ptxas keeps them in
registers then; constants it would move into one at every use (H200, 2026-11-29: a tenth of all instructions).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnpatch.tbq4.codec import LEVELS as _LEVELS
from attnpatch.tbq4.codec import STEP as _STEP

BYTES = tl.constexpr("codes in bytes")
WORDS = tl.constexpr("codes in words")
INT8_WORDS = tl.constexpr("codes in words, products in int8")
"""Forms of TBQ4 codes."""

INT8_ROWS = 8
"""Most rows of a tile of INT8_WORDS."""

LEVELS = tl.constexpr(_LEVELS[8:])
STEP = tl.constexpr(_STEP)
UPPER = tl.constexpr(254)


def _table(values: tuple[int, ...]) -> str:
    """Four bytes as a PTX constant."""
    return f"0x{int.from_bytes(bytes(x % 256 for x in values), 'little'):08X}"


def _tables(shift: int, above: int = 0) -> dict[str, str]:
    """Levels as bytes: four at a time, those of codes 8 on ``above`` more."""
    values = [level + shift + (above if code >= 8 else 0) for code, level in enumerate(_LEVELS)]
    return {f"t{i}": _table(tuple(values[4 * i : 4 * i + 4])) for i in range(4)}


_ZERO = "mov.u32 z, %laneid; mov.u32 a, %ctaid.y; and.b32 z, z, a; xor.b32 a, z, {t0}; xor.b32 b, z, {t2};"

# Bytes 128 + level of the eight codes in `word`: of the lower four in x, of the upper four in y.
_LOOK_UP = """
and.b32 m, {word}, 0x77777777; shr.u32 s, {word}, 1; lop3.b32 s, s, 0x44444444, 0x32103210, 0xEA;
prmt.b32 n, a, {t1}, m; prmt.b32 p, b, {t3}, m; prmt.b32 x, n, p, s;
shr.u32 m, m, 16; shr.u32 s, s, 16;
prmt.b32 n, a, {t1}, m; prmt.b32 p, b, {t3}, m; prmt.b32 y, n, p, s;
"""

# float16 from two bytes of x or y each.
_FLOATS = """
prmt.b32 m, x, 0x64646464, {first}; prmt.b32 n, x, 0x64646464, {second};
prmt.b32 p, y, 0x64646464, {first}; prmt.b32 s, y, 0x64646464, {second};
mov.b32 a, 0xE480E480;
add.rn.f16x2 $0, m, a; add.rn.f16x2 $1, n, a; add.rn.f16x2 $2, p, a; add.rn.f16x2 $3, s, a;
"""


def _floats(swap: str, word: str, first: str, second: str) -> str:
    body = _ZERO + swap + _LOOK_UP + _FLOATS
    body = body.format(**_tables(128), word=word, first=first, second=second)
    return "{ .reg .b32 z,a,b,m,s,n,p,x,y,w;" + body + "}"


FLOAT_KEYS = tl.constexpr(_floats("", "$4", "0x4140", "0x4342"))
"""Two words in $4. Products with K pair neighbours in a row: of the first word $0 has codes 0, 1, $1 has 2, 3."""

FLOAT_VALUES = tl.constexpr(_floats("prmt.b32 w, $4, $4, 0x3120;", "w", "0x4240", "0x4341"))
"""Two words in $4, of two keys, which products with V pair: $j has code j of both."""


def _int8_keys() -> str:
    body = _ZERO
    for i, word in enumerate(("$8", "$9")):
        low, high = 2 * i, 2 * i + 1
        body += f"""
mov.b32 m, {word}; xor.b32 x, {word}, 0x88888888;
prmt.b32 ${low}, a, {{t1}}, m; prmt.b32 ${low + 4}, b, {{t3}}, x;
shr.u32 m, {word}, 16; shr.u32 x, x, 16;
prmt.b32 ${high}, a, {{t1}}, m; prmt.b32 ${high + 4}, b, {{t3}}, x;
"""
    return "{ .reg .b32 z,a,b,m,x;" + body.format(**_tables(0, 1)) + "}"


INT8_KEYS = tl.constexpr(_int8_keys())
"""Four words in $8, $9: the codes of word i are $i below zero and $(i + 4) above."""


def _int8_values() -> str:
    """Words of keys 0, 1 in $8 and 2, 3 in $9: $j has code j of all four below zero, $(j + 4) above."""
    body = _ZERO
    for i, pair in enumerate(("0x6420", "0x7531")):  # bytes with codes 0, 1 and 2, 3 of each key
        low, high = 2 * i, 2 * i + 1
        body += f"""
prmt.b32 m, $8, $9, {pair}; xor.b32 x, m, 0x88888888; shr.u32 s, m, 16; shr.u32 y, x, 16;
prmt.b32 n, a, {{t1}}, m; prmt.b32 p, a, {{t1}}, s;
prmt.b32 ${low}, n, p, 0x6420; prmt.b32 ${high}, n, p, 0x7531;
prmt.b32 n, b, {{t3}}, x; prmt.b32 p, b, {{t3}}, y;
prmt.b32 ${low + 4}, n, p, 0x6420; prmt.b32 ${high + 4}, n, p, 0x7531;
"""
    return "{ .reg .b32 z,a,b,m,s,n,p,x,y;" + body.format(**_tables(0, 1)) + "}"


INT8_VALUES = tl.constexpr(_int8_values())
"""Products with V have neighbouring keys in a register."""


@triton.jit
def channels(columns, plane: tl.constexpr, step: tl.constexpr, joined: tl.constexpr, UNPACK: tl.constexpr):
    """Channels of q that ``columns`` of a plane of K hold, as :func:`unpack.planes` orders them.

    ``joined`` planes of 16 columns make one of 32, which is the narrowest product of int8.
    """
    if UNPACK == WORDS:
        found = 4 * (columns // 2 * 2 + plane // 2) + 2 * (plane % 2) + columns % 2
    elif UNPACK == INT8_WORDS:
        found = 16 * (columns // (4 * joined)) + 4 * (plane * joined + columns // 4 % joined) + columns % 4
    else:
        found = step * columns + plane
    return found


@triton.jit
def levels_of_bytes(tile, dtype: tl.constexpr):
    """Levels of the lower and of the upper codes."""
    return level(tile & 15).to(dtype), level(tile >> 4).to(dtype)


@triton.jit
def level(code):
    """LEVELS[code] in fp32."""
    above = code >= 8
    place = tl.where(above, code - 8, 7 - code)
    size = tl.full(code.shape, LEVELS[0], tl.float32)
    for i in tl.static_range(1, 8):
        size = tl.where(place == i, LEVELS[i], size)
    return tl.where(above, size, -size)


@triton.jit
def scaled(levels, norms):
    """Both planes of bytes as the channels of a rotated row: the levels times STEP and ``norms``."""
    dtype: tl.constexpr = levels[0].dtype
    return ((levels[0] * norms * STEP).to(dtype), (levels[1] * norms * STEP).to(dtype))


@triton.jit
def positive(x):
    """x, or 1 for 0."""
    return tl.where(x > 0.0, x, 1.0)


@triton.jit
def _join(even, odd):
    """Two planes as one, four columns of each in turn: a register's."""
    both = tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1] // 4, 4, 2])
    return tl.reshape(tl.permute(both, 0, 1, 3, 2), [even.shape[0], 2 * even.shape[1]])


@triton.jit
def levels_of_words(tile, INT8: tl.constexpr, IS_KEY: tl.constexpr):
    """Levels of words: four tiles in float16, or eight in int8, the levels below zero and then those above."""
    if INT8:
        ptx: tl.constexpr = INT8_KEYS if IS_KEY else INT8_VALUES
        bytes8: tl.constexpr = (tl.int8, tl.int8, tl.int8, tl.int8, tl.int8, tl.int8, tl.int8, tl.int8)
        names: tl.constexpr = "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r"
        out = tl.inline_asm_elementwise(ptx, names, [tile], bytes8, is_pure=True, pack=4)
        if IS_KEY and tile.shape[1] < 32:
            out = (_join(out[0], out[1]), _join(out[2], out[3]), _join(out[4], out[5]), _join(out[6], out[7]))
    else:
        asm: tl.constexpr = FLOAT_KEYS if IS_KEY else FLOAT_VALUES
        floats: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        out = tl.inline_asm_elementwise(asm, "=&r,=&r,=&r,=&r,r", [tile], floats, is_pure=True, pack=2)
    return out
