"""Queries as products with K take them, and the products. Device code.

Against TBQ4 codes a query is rotated once, by a kernel of its own, into ``rotated``: fp32 scratch that holds the rows
of q, in one order and contiguous, then a factor per row that makes up for their scaling.

    INT8_WORDS      int8 upper bytes of all rows, then the lower ones: row = factor * (254 * upper + lower)
    other codes     float16, the largest channel of a row 1; float32 as they are
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnpatch.kernels.common.hadamard import rotate
from attnpatch.kernels.common.primitives import head_base, products
from attnpatch.kernels.decode.codes import INT8_WORDS, UPPER, channels
from attnpatch.kernels.decode.int8 import keys_as_loaded, multiply, whole
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
        gdc_wait()  # the split kernel reads lengths before it waits for this one
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
    JOINED: tl.constexpr = 2 if UNPACK == INT8_WORDS and BLOCK_K < 32 else 1
    PLANES: tl.constexpr = STEPS // JOINED
    for plane in tl.static_range(TILES * PLANES):
        dims = channels(tl.arange(0, BLOCK_K * JOINED), plane % PLANES, STEPS, JOINED, UNPACK)
        dims += plane // PLANES * (HEAD_DIM // TILES)
        in_tile = dims < (plane // PLANES + 1) * (HEAD_DIM // TILES)
        in_width = exists[:, None] & in_tile[None, :]
        if rotated is None:
            pointers = row_pointers(q, q_strides, b, heads, queries, dims)
        else:
            offsets = rows.to(tl.int64) * HEAD_DIM
            if UNPACK == INT8_WORDS:
                halves = tl.arange(0, 2).to(tl.int64) * num_rows * HEAD_DIM
                offsets, in_width = tl.ravel(offsets[:, None] + halves[None, :]), (dims < HEAD_DIM)[None, :]
            pointers = rows_of_rotated(rotated, UNPACK, DTYPE) + offsets[:, None] + dims[None, :]
        out = out + (tl.load(pointers, mask=in_width, other=0.0),)
    return out


@triton.jit
def scores(queries, side: tl.constexpr, keys, UNPACK: tl.constexpr, PRECISION: tl.constexpr):
    """Products of the queries for tile ``side`` of K with its planes ``keys``, ``[m, n]`` in fp32."""
    if UNPACK == INT8_WORDS:
        PLANES: tl.constexpr = len(keys) // 2
        total = None
        for j in tl.static_range(2 * PLANES):  # the levels below zero, and those above
            total = multiply(keys[j], queries[side * PLANES + j % PLANES].T, total)
        s = keys_as_loaded(whole(total, UPPER))
    else:
        first: tl.constexpr = side * len(keys)
        s = products(queries[first], keys[0], PRECISION)
        for j in tl.static_range(1, len(keys)):
            if keys[0].dtype == tl.float32:
                s += products(queries[first + j], keys[j], PRECISION)
            else:
                s = tl.dot(queries[first + j], keys[j].T, s)
    return s
