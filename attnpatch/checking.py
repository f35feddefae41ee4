"""The operator's arguments, checked: an AttentionCall, or a ValueError that names the value and what it should be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnpatch.attention_call import PACKED, PREFILL_DTYPES, QUANTISED, AttentionCall, width_of
from attnpatch.kernels.common.support import KnownCall

_QUANTISED_NAMES = " or ".join(str(dtype).removeprefix("torch.") for dtype in (*QUANTISED, PACKED))


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sm_scale: float,
    attn_mask: Tensor | None = None,
    key_padding: Tensor | None = None,
    q_offset_tensor: Tensor | None = None,
    q_offset: int = 0,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float | None = None,
    key_bounds: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_shift: Tensor | None = None,
    v_shift: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    batch_invariant: bool = False,
    prefill_dtype: str | None = None,
) -> AttentionCall:
    """Check the operator's arguments and return them as an :class:`AttentionCall`.

    Raises:
        ValueError: see :func:`attnpatch.ops.attention`.
    """
    _check_qkv(q, k, v)
    k_scale, k_shift = _scale("k", k, k_scale, k_shift, q)
    v_scale, v_shift = _scale("v", v, v_scale, v_shift, q)
    batch, seqlen_k = _sizes(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k)
    if cu_seqlens_q is not None:
        _check_no_masks({"attn_mask": attn_mask, "key_padding": key_padding, "key_bounds": key_bounds})
    rows = q.shape[:3]
    if attn_mask is not None:
        check_mask_dtype(attn_mask, "attn_mask")
        attn_mask = _expanded("attn_mask", attn_mask, (*rows, seqlen_k), "batch, num_heads, seqlen_q, seqlen_k", q)
    if key_padding is not None:
        _check_padding(key_padding, (batch, seqlen_k), q)
    if key_bounds is not None:
        if key_bounds.dtype != torch.int32:
            raise ValueError(f"key_bounds must be int32; got {key_bounds.dtype}")
        key_bounds = _expanded("key_bounds", key_bounds, (*rows, 3), "batch, num_heads, seqlen_q, 3", q)
    _check_per_head(sinks, alibi_slopes, q, batch)
    offset = q_offset if q_offset_tensor is None else _offset(q_offset_tensor, q_offset, q, batch)
    masks = (attn_mask, key_padding, offset, window_left, window_right)
    terms = (softcap, key_bounds, sinks, alibi_slopes, None)
    storage = (block_table, k_scale, v_scale, k_shift, v_shift, cu_seqlens_q, cu_seqlens_k)
    check_prefill_dtype(prefill_dtype)
    return AttentionCall(q, k, v, sm_scale, *masks, *terms, *storage, batch_invariant, prefill_dtype)


def check_prefill_dtype(prefill_dtype: str | None) -> None:
    """Raise ValueError, which names the value, unless it is one of PREFILL_DTYPES."""
    if prefill_dtype not in PREFILL_DTYPES:
        raise ValueError(f"prefill_dtype={prefill_dtype!r} is none of {', '.join(map(repr, PREFILL_DTYPES))}")


def views(args: tuple[Any, ...]) -> tuple[tuple[int, torch.Size], ...]:
    """Check ``args``, those of :func:`make_call`: places and shapes of those that the call holds as views.

    Raises:
        ValueError: see :func:`attnpatch.ops.attention`.
    """
    call = make_call(*args)
    scales = {15: call.k_scale, 16: call.v_scale, 17: call.k_shift, 18: call.v_shift}
    held = {4: call.attn_mask, 6: call.q_offset, 11: call.key_bounds, **scales}
    tensors = [(place, x.shape) for place, x in held.items() if isinstance(x, Tensor)]
    return tuple((place, shape) for place, shape in tensors if shape != args[place].shape)


def known_call(args: tuple[Any, ...], views: tuple[tuple[int, torch.Size], ...], kind: object) -> KnownCall:
    """:func:`make_call` of ``args`` whose kind has passed it, which gave :func:`views`."""
    fields = [*args, *_DEFAULTS[len(args) :]]
    if fields[6] is None:
        fields[6] = fields[7]
    elif fields[7]:
        fields[6] = fields[6] + fields[7]
    for place, shape in views:
        fields[place] = fields[place].expand(shape)
    call = KnownCall._make([*fields[:7], *fields[8:14], None, *fields[14:]])
    call.kind = kind
    return call


_DEFAULTS = (None,) * 4 + (make_call.__defaults__ or ())


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"q, k and v must be [batch, heads, seqlen, head_dim]; got {q.dim()}, {k.dim()} and {v.dim()} dimensions"
        )
    of_kv = (q.dtype, *QUANTISED, PACKED)
    if q.dtype in QUANTISED or not q.is_floating_point() or k.dtype not in of_kv or v.dtype not in of_kv:
        raise ValueError(
            f"q, k and v must share one float dtype; got {q.dtype}, {k.dtype} and {v.dtype} "
            f"(k and v may be {_QUANTISED_NAMES}, with a scale)"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device; got {q.device}, {k.device} and {v.device}")
    if q.shape[3] != width_of(k):
        codes = f" ({k.shape[3]} bytes of codes, two channels each)" if k.dtype == PACKED else ""
        raise ValueError(f"q and k must share head_dim; got {q.shape[3]} and {width_of(k)}{codes}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k and v must have the same number of heads; got {k.shape[1]} and {v.shape[1]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"the {q.shape[1]} heads of q are not a multiple of the {k.shape[1]} heads of k and v")
    torch._check(
        k.shape[2] == v.shape[2],
        lambda: f"k and v must have the same length; got {k.shape[2]} and {v.shape[2]}",
    )


def _scale(
    name: str, x: Tensor, scale: Tensor | None, shift: Tensor | None, q: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The scale and the shift of k or v as views of its rows' shape."""
    if (x.dtype in (*QUANTISED, PACKED)) != (scale is not None):
        wrong = f"is missing for {name} in {x.dtype}" if scale is None else f"is given, but {name} is {x.dtype}"
        raise ValueError(f"{name}_scale {wrong}: it belongs to {name} in {_QUANTISED_NAMES} and to no other dtype")
    if shift is not None:
        return _groups(name, x, scale, shift, q)
    if scale is None:
        return None, None
    if x.dtype == PACKED:
        return _norms(name, x, scale, q), None
    if scale.dtype != torch.float32:
        raise ValueError(f"{name}_scale must be float32; got {scale.dtype}")
    return _expanded(f"{name}_scale", scale, x.shape[:3], "batch or num_pages, num_kv_heads, keys", q), None


def _groups(name: str, x: Tensor, scale: Tensor | None, shift: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and shifts of integers of 4 bits as views of their rows' shape, and groups."""
    if x.dtype != PACKED or scale is None:
        raise ValueError(f"{name}_shift is given, but {name} is {x.dtype}: it belongs to uint8, two channels to a byte")
    if scale.dtype != shift.dtype or scale.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"{name}_scale and {name}_shift must share float32, float16 or bfloat16; got {scale.dtype}, {shift.dtype}"
        )
    groups, axes = scale.shape[-1] if scale.dim() else 1, "batch or num_pages, num_kv_heads, keys, groups of head_dim"
    if groups == 0 or width_of(x) % groups:
        raise ValueError(f"{name}_scale has {groups} groups, which do not divide head_dim {width_of(x)}")
    scale, shift = (
        _expanded(f"{name}_{kind}", given, (*x.shape[:3], groups), axes, q)
        for kind, given in (("scale", scale), ("shift", shift))
    )
    return scale, shift


def _norms(name: str, x: Tensor, norms: Tensor, q: Tensor) -> Tensor:
    """The norms of k or v in TBQ4 codes as a view of its rows' shape, and blocks."""
    from attnpatch.tbq4 import blocks_of

    if norms.dtype != torch.float16:
        raise ValueError(f"{name}_scale of uint8 {name} holds TBQ4 norms, which are float16; got {norms.dtype}")
    shape = (*x.shape[:3], len(blocks_of(width_of(x))))
    return _expanded(f"{name}_scale", norms, shape, "batch or num_pages, num_kv_heads, keys, blocks of head_dim", q)


def _sizes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> tuple[int, int]:
    """Sequences, of which q, k and v have as many whichever way they hold them, and keys as AttentionCall has them."""
    batch, of_k, of_v, seqlen_k = q.shape[0], k.shape[0], v.shape[0], k.shape[2]
    if cu_seqlens_q is not None:
        batch = _num_sequences("cu_seqlens_q", cu_seqlens_q, {"q": q})
    if block_table is not None:
        _check_table(block_table, k, v)
        of_k = of_v = block_table.shape[0]
        seqlen_k *= block_table.shape[1]
    if cu_seqlens_k is not None:
        if cu_seqlens_q is None:
            raise ValueError("cu_seqlens_k is given without cu_seqlens_q: pack q too, or give k as [batch, ...]")
        if block_table is not None:
            raise ValueError("cu_seqlens_k and block_table are both given: K is packed or in pages, not both")
        of_k = of_v = _num_sequences("cu_seqlens_k", cu_seqlens_k, {"k": k, "v": v})
    if not batch == of_k == of_v:
        raise ValueError(f"q, k and v must share the batch size; got {batch}, {of_k} and {of_v}")
    return batch, seqlen_k


def _check_no_masks(masks: dict[str, Tensor | None]) -> None:
    for name, mask in masks.items():
        if mask is not None:
            raise ValueError(f"{name} is given beside cu_seqlens_q, which takes causal and window terms only")


def _num_sequences(name: str, seqlens: Tensor, packed: dict[str, Tensor]) -> int:
    """How many sequences ``seqlens`` divides the tensors ``packed`` into."""
    device = next(iter(packed.values())).device
    if seqlens.dtype != torch.int32 or seqlens.dim() != 1 or seqlens.shape[0] == 0 or seqlens.device != device:
        raise ValueError(
            f"{name} must be int32 [batch + 1] on {device}; "
            f"got {seqlens.dtype} {tuple(seqlens.shape)} on {seqlens.device}"
        )
    if not seqlens.is_contiguous():
        raise ValueError(f"{name} must be contiguous; got stride {seqlens.stride(0)}: give it {name}.contiguous()")
    for owner, x in packed.items():
        if x.shape[0] != 1:
            raise ValueError(f"{owner} must be [1, heads, total, head_dim] with {name}; got {tuple(x.shape)}")
    return seqlens.shape[0] - 1


def _check_table(block_table: Tensor, k: Tensor, v: Tensor) -> None:
    ok = block_table.dim() == 2 and block_table.dtype in (torch.int32, torch.int64)
    if not ok or block_table.device != k.device:
        raise ValueError(
            f"block_table must be int32 or int64 [batch, num_blocks] on {k.device}; "
            f"got {block_table.dtype} {tuple(block_table.shape)} on {block_table.device}"
        )
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"k and v must have as many pages; got {k.shape[0]} and {v.shape[0]}")
    if k.shape[0] == 0 or k.shape[2] == 0:
        raise ValueError(f"k must be [num_pages, num_kv_heads, page_size, head_dim], none 0; got {tuple(k.shape)}")


def _expanded(name: str, x: Tensor, shape: tuple[int, ...], axes: str, q: Tensor) -> Tensor:
    """``x`` as a view of ``shape``, whose dimensions are ``axes``, or a ValueError that shows both."""
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, q on {q.device}")
    try:
        return x.expand(shape)
    except RuntimeError:
        raise ValueError(f"{name} {tuple(x.shape)} does not broadcast to [{axes}] = {tuple(shape)}") from None


def check_mask_dtype(mask: Tensor, name: str) -> None:
    """Raise a ValueError that calls the mask ``name`` when it is neither bool nor float."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} must be bool (True = attend) or an additive float; got {mask.dtype}")


def _check_per_head(sinks: Tensor | None, alibi_slopes: Tensor | None, q: Tensor, batch: int) -> None:
    num_heads = q.shape[1]
    if sinks is not None and not (
        sinks.is_floating_point() and tuple(sinks.shape) == (num_heads,) and sinks.device == q.device
    ):
        raise ValueError(
            f"sinks must be a float [num_heads={num_heads}] on {q.device}; "
            f"got {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}"
        )
    if alibi_slopes is not None and not (
        alibi_slopes.dtype == torch.float32
        and tuple(alibi_slopes.shape) in ((num_heads,), (batch, num_heads))
        and alibi_slopes.device == q.device
    ):
        raise ValueError(
            f"alibi_slopes must be a float32 [num_heads={num_heads}] or [batch={batch}, num_heads] on {q.device}; "
            f"got {alibi_slopes.dtype} {tuple(alibi_slopes.shape)} on {alibi_slopes.device}"
        )


def _check_padding(key_padding: Tensor, shape: tuple[int, int], q: Tensor) -> None:
    if key_padding.dim() != 2 or key_padding.dtype != torch.bool or key_padding.device != q.device:
        raise ValueError(
            f"key_padding must be a bool [batch, seqlen_k] on {q.device}; "
            f"got {key_padding.dtype} {tuple(key_padding.shape)} on {key_padding.device}"
        )
    torch._check(
        key_padding.shape[0] == shape[0] and key_padding.shape[1] == shape[1],
        lambda: f"key_padding {tuple(key_padding.shape)} is not [batch, seqlen_k] = {tuple(shape)}",
    )


def _offset(q_offset: Tensor, constant: int, q: Tensor, batch: int) -> Tensor:
    """Their sum, ``[]`` or as a view of shape ``[batch]``: kernels step through it by its stride."""
    ok_shape = q_offset.dim() == 0 or (q_offset.dim() == 1 and q_offset.shape[0] in (1, batch))
    if not ok_shape or q_offset.dtype not in (torch.int32, torch.int64) or q_offset.device != q.device:
        raise ValueError(
            f"q_offset_tensor must be int32 or int64 of shape [] or [batch={batch}] on {q.device}; "
            f"got {q_offset.dtype} {tuple(q_offset.shape)} on {q_offset.device}"
        )
    q_offset = q_offset + constant if constant else q_offset
    return q_offset.expand(batch) if q_offset.dim() else q_offset
