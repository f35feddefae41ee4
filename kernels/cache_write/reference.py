"""New keys and values into caches, in plain torch: what runs without Triton, and what the kernel is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest code of each dtype of 8 bits."""


@torch.no_grad()
def cache_write(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See :func:`attnpatch.ops.cache_write`; waits for the device to know which positions lie inside."""
    batch, _, num_tokens, _ = k.shape
    if positions.dim() == 0:
        positions = positions + torch.arange(num_tokens, device=k.device)
    positions = positions.long().expand(batch, num_tokens)
    if block_table is None:
        inside = (positions >= 0) & (positions < k_cache.shape[2])
        sequences, tokens = inside.nonzero(as_tuple=True)
        places, rows = sequences, positions[inside]
    else:
        sequences, tokens, places, rows = _in_pages(positions, block_table, *k_cache.shape[:3:2])
    for cache, x, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        vectors = x[sequences, :, tokens]  # [inside, num_kv_heads, head_dim]
        if scale is not None:
            vectors, scale[places, :, rows] = quantised(vectors, cache.dtype)
            cache, vectors = cache.view(torch.int8), vectors.view(torch.int8)  # torch indexes no float of 8 bits
        cache[places, :, rows] = vectors


def _in_pages(positions: Tensor, block_table: Tensor, num_pages: int, page_size: int) -> tuple[Tensor, ...]:
    """Sequence, token, page and row of every position that lies on a page of the pool."""
    inside = (positions >= 0) & (positions < block_table.shape[1] * page_size)
    sequences, tokens = inside.nonzero(as_tuple=True)
    rows = positions[inside]
    pages = block_table[sequences, rows // page_size].long()
    exists = (pages >= 0) & (pages < num_pages)
    return sequences[exists], tokens[exists], pages[exists], rows[exists] % page_size


def quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Vectors ``[.., head_dim]`` in ``dtype``, one of LIMITS, and float32 scales ``[..]``: ``x = codes * scale``.

    The scale is the largest magnitude over the largest code, 1 where a vector is zero. A vector that holds NaN or
    infinity has scale inf and codes 0, and so reads back as NaN.
    """
    x = x.float()
    largest = x.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).amax(dim=-1)
    scale = largest / largest.new_full((), LIMITS[dtype])  # by a Python number, CUDA multiplies by the reciprocal
    scale = scale.masked_fill(scale == 0, 1.0)
    codes = (x / scale[..., None]).masked_fill(scale.isinf()[..., None], 0.0)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale
