"""Where the rows and keys of a tile lie, one sequence behind the other or each by itself, and how rows get there."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnpatch.kernels.prefill_hopper.gluon_names import store_tile, store_wait


@gluon.jit
def sequence_of(b, packing, seqlen_q, seqlen_k):
    """Where a tile's sequence lies: index in the batch dimension of q and of K, first row and key, how many of each.

    The first of all is its index among what there is per sequence. The rows of no sequence, behind the last, are one
    more without keys.
    """
    cu_seqlens_q, cu_seqlens_k, batch = packing
    if cu_seqlens_q is None:
        return b, b, b, 0, 0, seqlen_q, seqlen_k
    else:
        real = min(b, batch - 1)
        row = gl.load(cu_seqlens_q + b)
        num_rows = gl.load(cu_seqlens_q + b + 1, mask=b < batch, other=seqlen_q) - row
        if cu_seqlens_k is None:
            return real, b * 0, real, row, 0, num_rows, gl.where(b < batch, seqlen_k, 0)
        else:
            key = gl.load(cu_seqlens_k + b)
            num_keys = gl.load(cu_seqlens_k + b + 1, mask=b < batch, other=key) - key
            return real, b * 0, b * 0, row, key, num_rows, num_keys


@gluon.jit
def store_whole(o, o_buffer, acc, b, h, row, stop, SHARES_Q: gl.constexpr):
    """Store a tile that begins before row ``stop`` by TMA, which leaves out what lies behind the tensor's rows."""
    if not SHARES_Q:
        store_wait(0)
    o_buffer.reshape((o_buffer.shape[2], o_buffer.shape[3])).store(acc.to(o_buffer.dtype))
    fence_async_shared()
    if row < stop:
        store_tile(o, [b, h, row, 0], o_buffer)
    if SHARES_Q:
        store_wait(0)


@gluon.jit
def store_rows(o_rows, acc, row, h, num_rows, num_heads, HEAD_DIM_V: gl.constexpr):
    """Store the first rows of a tile that ends within them, from ``row`` of all sequences on."""
    LAYOUT: gl.constexpr = acc.type.layout
    rows = gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    vectors = (row + rows).to(gl.int64) * num_heads + h
    inside = (rows < num_rows)[:, None]
    if acc.shape[1] > HEAD_DIM_V:
        inside = inside & (columns < HEAD_DIM_V)[None, :]
    pointers = o_rows + (vectors * HEAD_DIM_V)[:, None] + columns[None, :]
    gl.store(pointers, acc.to(o_rows.dtype.element_ty), mask=inside)
