"""Rotary position embeddings: channel i of the first half of a row and channel i of the second turn by one angle."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _pointers(base, strides, a, b, c, cols):
    """Elements [a, b, c, cols] of rows a, b, c."""
    rows = base + (a * strides[0] + b * strides[1] + c * strides[2])
    return rows[:, None] + cols[None, :] * strides[3]


@triton.jit
def _turn(
    x,  # [size_0, size_1, size_2, 2 * HALF]
    cos,  # of x's shape, broadcast dimensions have stride 0
    sin,
    o,
    x_strides,
    cos_strides,
    sin_strides,
    o_strides,
    program,
    size_1,
    size_2,
    num_rows,
    HALF: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """BLOCK_R rows of x; its first three dimensions are one of num_rows."""
    rows = program.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    a, b, c = rows // size_2 // size_1, rows // size_2 % size_1, rows % size_2
    cols = tl.arange(0, BLOCK_H).to(tl.int64)
    inside = (rows < num_rows)[:, None] & (cols < HALF)[None, :]

    x_1 = tl.load(_pointers(x, x_strides, a, b, c, cols), mask=inside).to(tl.float32)
    x_2 = tl.load(_pointers(x, x_strides, a, b, c, cols + HALF), mask=inside).to(tl.float32)
    cos_1 = tl.load(_pointers(cos, cos_strides, a, b, c, cols), mask=inside).to(tl.float32)
    cos_2 = tl.load(_pointers(cos, cos_strides, a, b, c, cols + HALF), mask=inside).to(tl.float32)
    sin_1 = tl.load(_pointers(sin, sin_strides, a, b, c, cols), mask=inside).to(tl.float32)
    sin_2 = tl.load(_pointers(sin, sin_strides, a, b, c, cols + HALF), mask=inside).to(tl.float32)
    o_1 = x_1 * cos_1 - x_2 * sin_1
    o_2 = x_2 * cos_2 + x_1 * sin_2
    tl.store(_pointers(o, o_strides, a, b, c, cols), o_1.to(o.dtype.element_ty), mask=inside)
    tl.store(_pointers(o, o_strides, a, b, c, cols + HALF), o_2.to(o.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sizes_0", "sizes_1"])
def _rotary_kernel(
    x_0,
    cos_0,
    sin_0,
    x_1,  # like x_0, of other sizes, or None
    cos_1,
    sin_1,
    o_0,
    o_1,
    strides_0,  # of x, cos, sin and o
    strides_1,
    sizes_0,  # size_1, size_2 and num_rows
    sizes_1,
    HALF: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs of the rows of x_0, then of x_1."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    behind_0 = tl.cdiv(sizes_0[2], BLOCK_R)
    if program < behind_0:
        _turn(x_0, cos_0, sin_0, o_0, *strides_0, program, *sizes_0, HALF, BLOCK_R, BLOCK_H)
    elif x_1 is not None:
        _turn(x_1, cos_1, sin_1, o_1, *strides_1, program - behind_0, *sizes_1, HALF, BLOCK_R, BLOCK_H)
