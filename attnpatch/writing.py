"""The operator that writes new keys and values into caches: dense ones, pages, and caches of 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnpatch.attention_call import PACKED, QUANTISED, width_of

SCHEMA = (
    "cache_write(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor positions, "
    "Tensor? block_table=None, Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, int? ring_from=None) -> ()"
)


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
    """Write the keys and values of new tokens into caches, in place and in one launch.

    A token whose position lies outside the cache, or on a page id outside the pool, is left out. If two tokens go to
    one place, either may stay. Gradients do not pass.

    Args:
        k_cache: ``[batch, num_kv_heads, capacity, head_dim]``, any strides; with block_table, pages
            ``[num_pages, num_kv_heads, page_size, head_dim]``. In k's dtype, or int8, float8_e4m3fn or float8_e5m2;
            or uint8 of width ``head_dim // 2``: TBQ4 codes (:mod:`attnpatch.tbq4`).
        v_cache: likewise, of width head_dim_v; quantised or not whatever k_cache is.
        k: ``[batch, num_kv_heads, num_tokens, head_dim]``, float, any strides.
        v: ``[batch, num_kv_heads, num_tokens, head_dim_v]``.
        positions: int32 or int64 on the device of k: ``[batch, num_tokens]``, ``[num_tokens]`` where all sequences
            have the same, or ``[]``: of the first token, the others follow it.
        block_table: int32 or int64 ``[batch, num_blocks]``: position p of sequence b is row ``p % page_size`` of page
            ``block_table[b, p // page_size]``.
        k_scale: float32, of k_cache's shape without head_dim, any strides; exactly when k_cache is quantised. Gets the
            scale per token and head, by which the codes are multiplied: the largest magnitude over 127, 448 or 57344,
            1 where a key is zero. int8 rounds ties to even. A key that holds NaN or infinity reads back as NaN.
            Beside TBQ4 codes, float16 ``[.., num_blocks]``: gets the norm per block.
        v_scale: likewise for v_cache.
        ring_from: the row from which on the caches are a ring, None = they are none: position p behind it is row
            ``ring_from + (p - ring_from) % (capacity - ring_from)``, and of more tokens than fit the last ones stay.
            positions are ``[]`` then, and there is no block_table.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or a cache is expanded; the message names them.
    """
    torch.ops.attnpatch.cache_write(k_cache, v_cache, k, v, positions, block_table, k_scale, v_scale, ring_from)


class CacheWrite(NamedTuple):
    """The tensors that :func:`cache_write` is given."""

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    block_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def run(*args: Any) -> None:
    """The operator; ``args`` are those of :func:`cache_write`, in order. Checked once per kind of arguments."""
    from attnpatch.kernels.common.support import planned

    write, ring_from = _taken(args)
    planned(_implementation, write, ring_from)(*write)


def fake(*args: Any) -> None:
    """The operator on tensors without data."""
    check(*_taken(args))


def _taken(args: tuple[Any, ...]) -> tuple[CacheWrite, int | None]:
    """What the operator is given: tensors, and where a ring begins."""
    size = len(CacheWrite._fields)
    return CacheWrite(*args[:size]), args[size] if len(args) > size else None


def _implementation(write: CacheWrite, ring_from: int | None) -> Callable[..., None]:
    """What writes tensors of this kind, called with all of them."""
    check(write, ring_from)
    if _refused_by_triton(write):
        from attnpatch.kernels.cache_write import reference

        return partial(reference.cache_write, ring_from=ring_from)
    from attnpatch.kernels.cache_write import launch

    return launch.cache_write(write, ring_from)


def _refused_by_triton(write: CacheWrite) -> bool:
    from attnpatch.kernels.common.support import capability, has_triton

    if not write.k_cache.is_cuda or not has_triton():
        return True
    narrow = torch.float8_e4m3fn in (write.k_cache.dtype, write.v_cache.dtype)
    return capability(write.k_cache.device) < ((8, 9) if narrow else (8, 0))


def check(write: CacheWrite, ring_from: int | None = None) -> None:
    """Raise what :func:`cache_write` raises."""
    _check_shapes(write)
    _check_cache("k", write.k_cache, write.k, write.k_scale)
    _check_cache("v", write.v_cache, write.v, write.v_scale)
    _check_positions(write.positions, *write.k.shape[:3:2])
    _check_places(write.k_cache, write.block_table, write.k.shape[0])
    if ring_from is not None:
        _check_ring(write, ring_from)
    for name, x in write._asdict().items():
        if x is not None and x.device != write.k.device:
            raise ValueError(f"{name} is on {x.device}, k on {write.k.device}; cache_write needs all on one device")


def _check_ring(write: CacheWrite, start: int) -> None:
    if write.positions.dim() or write.block_table is not None or not 0 <= start < write.k_cache.shape[2]:
        raise ValueError(
            f"ring_from={start} needs positions of shape [], no block_table, and caches of more rows; positions are "
            f"{list(write.positions.shape)}, k_cache is {tuple(write.k_cache.shape)}"
        )


def _check_positions(positions: Tensor, batch: int, num_tokens: int) -> None:
    if not _is_integer(positions) or tuple(positions.shape) not in ((), (num_tokens,), (batch, num_tokens)):
        raise ValueError(
            f"positions must be int32 or int64 of shape [], [num_tokens={num_tokens}] or "
            f"[batch={batch}, num_tokens={num_tokens}]; got {positions.dtype} {tuple(positions.shape)}"
        )


def _check_places(k_cache: Tensor, block_table: Tensor | None, batch: int) -> None:
    if block_table is None:
        if k_cache.shape[0] != batch:
            raise ValueError(
                f"k_cache must have a row for each of the {batch} sequences of k; got {k_cache.shape[0]}. "
                "Pages need a block_table"
            )
    elif not _is_integer(block_table) or block_table.dim() != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"block_table must be int32 or int64 [batch={batch}, num_blocks]; "
            f"got {block_table.dtype} {tuple(block_table.shape)}"
        )
    elif block_table.shape[1] == 0 or k_cache.shape[2] == 0:
        raise ValueError(
            f"a sequence must have a block and a page a row at least; block_table is {tuple(block_table.shape)}, "
            f"k_cache {tuple(k_cache.shape)}"
        )


def _is_integer(x: Tensor) -> bool:
    return x.dtype in (torch.int32, torch.int64)


def _check_shapes(write: CacheWrite) -> None:
    k_cache, v_cache, k, v = write[:4]
    if not k_cache.dim() == v_cache.dim() == k.dim() == v.dim() == 4:
        dims = ", ".join(str(x.dim()) for x in write[:4])
        raise ValueError(f"k_cache, v_cache, k and v must have 4 dimensions; they have {dims}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k and v must share [batch, num_kv_heads, num_tokens]; got {tuple(k.shape[:3])} and {tuple(v.shape[:3])}"
        )
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            "k_cache and v_cache must agree in all but the last dimension; "
            f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )


def _check_cache(name: str, cache: Tensor, x: Tensor, scale: Tensor | None) -> None:
    """One of K and V: as wide as its cache, in a dtype that goes into it, with a scale exactly when that is needed."""
    if (x.shape[1], x.shape[3]) != (cache.shape[1], width_of(cache)):
        codes = " (two TBQ4 codes per byte)" if cache.dtype == PACKED else ""
        raise ValueError(
            f"{name} has {x.shape[1]} heads of width {x.shape[3]}, "
            f"{name}_cache {cache.shape[1]} of width {width_of(cache)}{codes}; they must agree"
        )
    if cache.dtype in (*QUANTISED, PACKED):
        _check_quantised(name, cache, x, scale)
    elif x.dtype != cache.dtype:
        raise ValueError(f"{name} is {x.dtype}, {name}_cache {cache.dtype}: cast {name}, or quantise the cache")
    elif scale is not None:
        raise ValueError(f"{name}_scale is for a quantised {name}_cache; this one is {cache.dtype}")
    for kind, written in (("cache", cache), ("scale", scale)):
        if written is not None and any(
            n > 1 and stride == 0 for n, stride in zip(written.shape, written.stride(), strict=True)
        ):
            raise ValueError(
                f"{name}_{kind} {tuple(written.shape)} has strides {written.stride()}: it is expanded, and one write "
                "would reach several places. Give it memory of its own"
            )


def _check_quantised(name: str, cache: Tensor, x: Tensor, scale: Tensor | None) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"{name} must be float16, bfloat16 or float32 to be quantised here; got {x.dtype}")
    dtype, shape, meaning = _scale_of(cache)
    wanted = f"{str(dtype).removeprefix('torch.')} of shape {shape}, {meaning}"
    if scale is None:
        raise ValueError(f"a {cache.dtype} {name}_cache needs {name}_scale: {wanted}")
    if (scale.dtype, tuple(scale.shape)) != (dtype, shape):
        raise ValueError(f"{name}_scale must be {wanted}; got {scale.dtype} {tuple(scale.shape)}")


def _scale_of(cache: Tensor) -> tuple[torch.dtype, tuple[int, ...], str]:
    """Dtype and shape of what stands beside a quantised cache, and what it is."""
    if cache.dtype != PACKED:
        return torch.float32, tuple(cache.shape[:3]), "a scale per token and head"
    from attnpatch.tbq4 import blocks_of

    blocks = blocks_of(width_of(cache))
    return torch.float16, (*cache.shape[:3], len(blocks)), f"a norm per token, head and block of {blocks}"
