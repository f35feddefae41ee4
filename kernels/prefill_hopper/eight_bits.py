"""Probabilities in 8 bit floats (e4m3), four to a register, from one product to the next without leaving their thread.

Of 16 columns, thread q of the four that share a row holds 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of a product, and
4 q .. 4 q + 3 of an operand in 8 bits. So columns are renamed: what stands in column 4 q + 2 a + e of the operand is of
key 8 a + 2 q + e, and keys of V lie in that order (quantise.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

_PACK = gl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
    "mov.b32 $0, {low, high}; }"
)
_FIRST = gl.constexpr("mov.b32 $0, $1;")


@gluon.jit
def words(p):
    """Four probabilities of ``[rows, keys]`` per int32, ``[rows, keys // 16, 4]``.

    A loop is to carry them so: of 8 bit floats it would unpack and pack each one.
    """
    low, high = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 16, 2, 4, 2]))
    p_0, p_2 = gl.split(gl.permute(low, (0, 1, 3, 2)))
    p_1, p_3 = gl.split(gl.permute(high, (0, 1, 3, 2)))
    return gl.inline_asm_elementwise(_PACK, "=r,r,r,r,r", [p_0, p_1, p_2, p_3], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _operand(packed, LAYOUT: gl.constexpr):
    """``[rows, keys]`` of 8 bit floats: each word four times, and the four become one register."""
    pairs = gl.join(packed, packed)
    same = gl.reshape(gl.join(pairs, pairs), [packed.shape[0], packed.shape[1] * 16])
    same = gl.convert_layout(same, LAYOUT)
    return gl.inline_asm_elementwise(_FIRST, "=r,r,r,r,r", [same], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def plus_values(acc, packed, v_s, stage):
    """Start ``acc + p v`` of a block of the ring, where V lies transposed."""
    p_tile = _operand(packed, gl.DotOperandLayout(0, acc.type.layout, 4))
    v_tile = v_s.index(stage).reshape((v_s.shape[3], v_s.shape[4])).permute((1, 0))
    return warpgroup_mma(p_tile, v_tile, acc, is_async=True)
