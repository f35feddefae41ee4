"""Queries as products with K take them, and the products. Device code.

Against TBQ4 codes a query is rotated once, by a kernel of its own, into ``rotated``: fp32 scratch that holds the rows
of q, in one order and contiguous, then a factor per row that makes up for their scaling.

    INT8_WORDS      int8 upper bytes of all rows, then the lower ones: row = factor * (254 * upper + lower)
    other codes     float16, the largest channel of a row 1; float32 as they are
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from attnpatch.kernels.common.hadamard import rotate
from attnpatch.kernels.common.primitives import head_base, products
from attnpatch.kernels.decode.codes import INT8_WORDS, UPPER, channels
from attnpatch.kernels.decode.places import row_pointers

LARGEST_INT = tl.constexpr(127 * UPPER.value)


@triton.jit(do_not_specialize=["seqlen_q", "num_heads", "num_rows"])
def _rotate_kernel(
    q,  # [batch, num_heads, seqlen_q, HEAD_DIM], or packed
    rotated,
    q_strides,
    seqlen_q,
    num_heads,
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNPACK: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rotate one row of q."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    i, h, b = row % seqlen_q, row // seqlen_q % num_heads, row // seqlen_q // num_heads
    pointers = head_base(q, q_strides, b, h) + i.to(tl.int64) * q_strides[2] + cols.to(tl.int64) * q_strides[3]
    y = rotate(tl.load(pointers, mask=cols < HEAD_DIM, other=0.0).to(tl.float32), BLOCKS)
    unit = tl.max(tl.abs(y), axis=0)
    unit = tl.where(unit > 0.0, unit, 1.0) + tl.sum(y, axis=0) * 0.0  # NaN where a channel is NaN or infinite
    out = rows_of_rotated(rotated, UNPACK, DTYPE) + row.to(tl.int64) * HEAD_DIM + cols
    if UNPACK == INT8_WORDS:
        unit /= LARGEST_INT
        whole = tl.floor(y / unit + 0.5)
        upper = tl.floor(whole / UPPER + 0.5)
        tl.store(out, upper.to(tl.int8), mask=cols < HEAD_DIM)
        tl.store(out + num_rows.to(tl.int64) * HEAD_DIM, (whole - upper * UPPER).to(tl.int8), mask=cols < HEAD_DIM)
    else:
        if DTYPE == tl.float32:
            unit = unit * 0.0 + 1.0
        tl.store(out, (y / unit).to(out.dtype.element_ty), mask=cols < HEAD_DIM)
    tl.store(factors_of_rotated(rotated, num_rows, HEAD_DIM, DTYPE) + row, unit)


@triton.jit
def rows_of_rotated(rotated, UNPACK: tl.constexpr, DTYPE: tl.constexpr):
    """Pointer to the first row, in the dtype of the rows."""
    if UNPACK == INT8_WORDS:
        rows = rotated.to(tl.pointer_type(tl.int8), bitcast=True)
    elif DTYPE == tl.float32:
        rows = rotated
    else:
        rows = rotated.to(tl.pointer_type(tl.float16), bitcast=True)
    return rows


@triton.jit
def factors_of_rotated(rotated, num_rows, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Pointer to the factor of row 0."""
    return rotated + tl.cast(num_rows, tl.int64) * (HEAD_DIM if DTYPE == tl.float32 else HEAD_DIM // 2)


@triton.jit
def load_queries(
    q,
    q_strides,
    rotated,
    b,
    heads,
    queries,  # of the whole q
    rows,  # index of each among all rows of q
    num_rows,
    exists,
    UNPACK: tl.constexpr,
    STEPS: tl.constexpr,
    TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of q for every plane of K: a tuple, the planes of K's first tile first."""
    out = ()
    for plane in tl.static_range(TILES * STEPS):
        dims = channels(tl.arange(0, BLOCK_K), plane % STEPS, STEPS, UNPACK) + plane // STEPS * (BLOCK_K * STEPS)
        in_width = exists[:, None] & (dims < HEAD_DIM)[None, :]
        if rotated is None:
            pointers = row_pointers(q, q_strides, b, heads, queries, dims)
        else:
            offsets = rows.to(tl.int64) * HEAD_DIM
            if UNPACK == INT8_WORDS:
                halves = tl.arange(0, 2).to(tl.int64) * num_rows * HEAD_DIM
                offsets, in_width = tl.ravel(halves[:, None] + offsets[None, :]), (dims < HEAD_DIM)[None, :]
            pointers = rows_of_rotated(rotated, UNPACK, DTYPE) + offsets[:, None] + dims[None, :]
        out = out + (tl.load(pointers, mask=in_width, other=0.0),)
    return out


@triton.jit
def scores(queries, first: tl.constexpr, keys, UNPACK: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr):
    """Sum of the products of ``queries[first]`` on with the planes ``keys`` of a tile of K, ``[m, n]`` in fp32."""
    if UNPACK == INT8_WORDS:
        total = tl.dot(queries[first], keys[0].T, out_dtype=tl.int32)
        for j in tl.static_range(1, 2 * STEPS):  # the levels below zero, and those above
            total = tl.dot(queries[first + j % STEPS], keys[j].T, total, out_dtype=tl.int32)
        s = total.to(tl.float32)
    else:
        s = products(queries[first], keys[0], PRECISION)
        for j in tl.static_range(1, STEPS):
            if keys[0].dtype == tl.float32:
                s += products(queries[first + j], keys[j], PRECISION)
            else:
                s = tl.dot(queries[first + j], keys[j].T, s)
    return s


@triton.jit
def sum_of_halves(s):
    """The upper half of the rows plus the lower one: what products of upper and lower bytes come to."""
    return tl.sum(tl.reshape(s, [2, s.shape[0] // 2, s.shape[1]]), axis=0)


@triton.jit
def copies(x, COUNT: tl.constexpr):
    """A statistic of rows, for each of their COUNT copies."""
    return tl.ravel(tl.permute(tl.join(x, x), 1, 0)) if COUNT == 2 else x


@triton.jit
def row_copies(x, COUNT: tl.constexpr):
    """All rows of ``x`` COUNT times, two of them of 16 bits.

    The second copy is XORed with 0 in a register: from one register for both, ptxas makes the four that an operand
    takes anew for every product (70 moves a tile of 64 keys).
    """
    if COUNT == 2:
        asm: tl.constexpr = (
            "{.reg .b32 z, a; mov.u32 z, %laneid; mov.u32 a, %ctaid.y; and.b32 z, z, a; xor.b32 $0, $1, z;}"
        )
        again = tl.inline_asm_elementwise(asm, "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)
        x = tl.reshape(tl.permute(tl.join(x, again), 2, 0, 1), [2 * x.shape[0], x.shape[1]])
    return x


@triton.jit
def one_copy(x, COUNT: tl.constexpr):
    """The rows of which ``x`` holds COUNT copies."""
    return sum_of_halves(x) * 0.5 if COUNT == 2 else x
