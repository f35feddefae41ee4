"""Host side of the kernel that writes caches."""

from __future__ import annotations

from torch import Tensor

from attnpatch.kernels.cache_write.kernel import _cache_write_kernel
from attnpatch.kernels.cache_write.reference import LIMITS
from attnpatch.kernels.common.launcher import Launch
from attnpatch.kernels.common.support import strides

MANY_TOKENS = 16
"""Tokens of one program, where there are several."""


def cache_write(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Launch:
    """The launch, of these very tensors, that does :func:`attnpatch.ops.cache_write`; they are checked already."""
    batch, num_kv_heads, num_tokens, head_dim = k.shape
    paged = block_table is not None
    block_t = 1 if num_tokens == 1 else MANY_TOKENS
    return Launch(
        _cache_write_kernel,
        batch * num_kv_heads * -(-num_tokens // block_t),
        k_cache_strides=k_cache.stride(),
        v_cache_strides=v_cache.stride(),
        k_strides=k.stride(),
        v_strides=v.stride(),
        positions_strides=positions.expand(batch, num_tokens).stride() if positions.dim() else None,
        table_strides=strides(block_table),
        k_scale_strides=strides(k_scale),
        v_scale_strides=strides(v_scale),
        num_kv_heads=num_kv_heads,
        num_tokens=num_tokens,
        capacity=k_cache.shape[2] * (1 if block_table is None else block_table.shape[1]),
        num_pages=k_cache.shape[0] if paged else None,
        page_size=k_cache.shape[2] if paged else None,
        K_LIMIT=LIMITS.get(k_cache.dtype),
        V_LIMIT=LIMITS.get(v_cache.dtype),
        HEAD_DIM=head_dim,
        HEAD_DIM_V=v.shape[3],
        BLOCK_T=block_t,
        BLOCK_D=_power_of_two(head_dim),
        BLOCK_DV=_power_of_two(v.shape[3]),
        num_warps=1 if block_t == 1 else 4,
    )


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
