"""New keys and values into caches, in plain torch: what runs without Triton, and what the kernel is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from attnpatch.attention_call import PACKED
from attnpatch.tbq4 import encode

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
    ring_from: int | None = None,
) -> None:
    """See :func:`attnpatch.ops.cache_write`; waits for the device to know whether positions lie outside."""
    batch, _, num_tokens, _ = k.shape
    num_places, _, num_rows, _ = k_cache.shape
    if positions.dim() == 0:
        positions = positions + torch.arange(num_tokens, device=k.device)
    rows = positions.long().expand(batch, num_tokens)
    places = torch.arange(batch, device=k.device)[:, None].expand(batch, num_tokens)
    inside = (rows >= 0) & (rows < num_rows * (1 if block_table is None else block_table.shape[1]))
    if ring_from is not None:
        size = num_rows - ring_from
        in_front = rows < ring_from
        inside = (rows >= 0) & (in_front | (rows > rows[:, -1:] - size))
        rows = torch.where(in_front, rows, ring_from + (rows - ring_from) % size)
    if block_table is not None:
        blocks = torch.where(inside, rows, 0) // num_rows
        places, rows = block_table.gather(1, blocks).long(), rows % num_rows
        inside = inside & (places >= 0) & (places < num_places)
    chosen = ... if inside.all() else inside
    for cache, x, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        vectors = x.transpose(1, 2)[chosen]  # [.., num_kv_heads, head_dim]
        if scale is not None:
            vectors, scales = encode(vectors) if cache.dtype == PACKED else quantised(vectors, cache.dtype)
            scale.transpose(1, 2)[places[chosen], rows[chosen]] = scales
            cache, vectors = cache.view(torch.int8), vectors.view(torch.int8)  # torch indexes no float of 8 bits
        cache.transpose(1, 2)[places[chosen], rows[chosen]] = vectors


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
