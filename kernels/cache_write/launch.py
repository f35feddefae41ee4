"""Host side of the kernel that writes caches."""

from __future__ import annotations

from collections.abc import Callable

from attnpatch.attention_call import PACKED
from attnpatch.kernels.cache_write.kernel import _cache_write_kernel
from attnpatch.kernels.cache_write.reference import LIMITS
from attnpatch.kernels.common.launcher import Launch, overlapping, overlaps
from attnpatch.kernels.common.support import strides
from attnpatch.tbq4 import blocks_of
from attnpatch.writing import CacheWrite

MANY_TOKENS = 16
"""Tokens of one program, where there are several."""

MANY_ENCODED = 4
"""The same for TBQ4, and one warp for them: a rotation over several would wait for all at each of its steps."""


def cache_write(write: CacheWrite, ring_from: int | None = None) -> Callable[..., None]:
    """What does :func:`attnpatch.ops.cache_write` of such arguments, in one launch; they are checked already."""
    launch = _launch(write, ring_from)
    return lambda *write: launch(write)


def _launch(write: CacheWrite, ring_from: int | None) -> Launch:
    batch, num_kv_heads, num_tokens, head_dim = write.k.shape
    head_dim_v = write.v.shape[3]
    paged = write.block_table is not None
    num_pages, _, page_size, _ = write.k_cache.shape
    encodes = PACKED in (write.k_cache.dtype, write.v_cache.dtype)
    block_t = 1 if num_tokens == 1 else MANY_ENCODED if encodes else MANY_TOKENS
    return Launch(
        _cache_write_kernel,
        batch * num_kv_heads * -(-num_tokens // block_t),
        write,
        CacheWrite._fields,
        (),
        k_cache_strides=write.k_cache.stride(),
        v_cache_strides=write.v_cache.stride(),
        k_strides=write.k.stride(),
        v_strides=write.v.stride(),
        positions_strides=write.positions.expand(batch, num_tokens).stride() if write.positions.dim() else None,
        table_strides=strides(write.block_table),
        k_scale_strides=strides(write.k_scale),
        v_scale_strides=strides(write.v_scale),
        num_kv_heads=num_kv_heads,
        num_tokens=num_tokens,
        capacity=page_size * (1 if write.block_table is None else write.block_table.shape[1]),
        num_pages=num_pages if paged else None,
        page_size=page_size if paged else None,
        K_LIMIT=LIMITS.get(write.k_cache.dtype),
        V_LIMIT=LIMITS.get(write.v_cache.dtype),
        K_BLOCKS=blocks_of(head_dim) if write.k_cache.dtype == PACKED else None,
        V_BLOCKS=blocks_of(head_dim_v) if write.v_cache.dtype == PACKED else None,
        RING_FROM=ring_from,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        BLOCK_T=block_t,
        BLOCK_D=_power_of_two(head_dim),
        BLOCK_DV=_power_of_two(head_dim_v),
        num_warps=4 if block_t == MANY_TOKENS else 1,
        **overlapping(overlaps(write.k.device)),
    )


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
