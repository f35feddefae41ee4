"""The operators that rewrites end in. Torch only, no Triton.

    attention            o
    attention_lse        o and the logarithm of the softmax's denominator
    attention_backward   of both
    key_bounds           a mask as the term of that name

Functional (they write nothing they did not allocate), with one output layout. Defined through
``torch.library.Library`` and not ``custom_op``: dispatch costs 7 us that way instead of 17 us (torch 2.13, 2 cores).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnpatch import dispatch, masking
from attnpatch.attention_call import AttentionCall, new_output

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, float sm_scale, Tensor? attn_mask=None, Tensor? key_padding=None, "
    "Tensor? q_offset_tensor=None, SymInt q_offset=0, SymInt? window_left=None, SymInt? window_right=None, "
    "float? softcap=None, Tensor? key_bounds=None, Tensor? sinks=None, Tensor? alibi_slopes=None"
)
_NUM_ARGUMENTS = 14
_LIBRARY = torch.library.Library("attnpatch", "DEF")
for _schema in (
    f"attention({_ARGUMENTS}, str backends='') -> Tensor",
    f"attention_lse({_ARGUMENTS}, str backends='') -> (Tensor, Tensor)",
    f"attention_backward(Tensor grad_o, Tensor? grad_lse, {_ARGUMENTS}) -> ({', '.join(['Tensor'] * 6)})",
    "key_bounds(Tensor mask) -> Tensor",
):
    _LIBRARY.define(_schema, tags=[torch.Tag.pt2_compliant_tag])


def attention(
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
    backends: str = "",
) -> Tensor:
    """Attention with its mask in terms; see :mod:`attnpatch.attention_call` for what each term means.

    Args:
        q: ``[batch, num_heads, seqlen_q, head_dim]``, any strides.
        k: ``[batch, num_kv_heads, seqlen_k, head_dim]``; num_heads is a multiple of num_kv_heads.
        v: ``[batch, num_kv_heads, seqlen_k, head_dim_v]``.
        sm_scale: factor on q.k.
        attn_mask: bool (True = attend) or additive float, broadcastable to
            ``[batch, num_heads, seqlen_q, seqlen_k]``.
        key_padding: bool ``[batch, seqlen_k]``, True = a real key.
        q_offset_tensor: int ``[]`` or ``[batch]``, added to ``q_offset``; its value may live on the device.
        q_offset: position of query row 0 among the keys.
        window_left: keys visible left of a query's position; None = all.
        window_right: keys visible right of it; 0 = causal; None = all.
        softcap: cap on the scaled scores.
        key_bounds: int32, broadcastable to ``[batch, num_heads, seqlen_q, 3]``, as :func:`key_bounds` makes it.
        sinks: float ``[num_heads]``: one more score per row, of no key.
        alibi_slopes: float32 ``[num_heads]`` or ``[batch, num_heads]``.
        backends: comma-separated names that may run it; empty = all, in order of preference.

    Returns:
        ``[batch, num_heads, seqlen_q, head_dim_v]``, a view of contiguous ``[batch, seqlen_q, num_heads, head_dim_v]``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; the message names them.
        attnpatch.errors.NoBackend: every backend allowed refuses.
    """
    masks = (attn_mask, key_padding, q_offset_tensor, q_offset, window_left, window_right)
    terms = (softcap, key_bounds, sinks, alibi_slopes)
    return torch.ops.attnpatch.attention(q, k, v, sm_scale, *masks, *terms, backends)


def attention_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """:func:`attention`, of the same arguments, and its lse.

    Returns:
        The output, and float32 ``[batch, num_heads, seqlen_q]``: the natural logarithm of the softmax's denominator,
        -inf for a row without a visible key.

    Raises:
        ValueError: see :func:`attention`.
        attnpatch.errors.NoBackend: likewise.
    """
    return torch.ops.attnpatch.attention_lse(*args, **kwargs)


def key_bounds(mask: Tensor) -> Tensor:
    """The first and the last key that each row of a mask sees, and whether all between are plainly visible.

    Args:
        mask: bool (True = attend) or additive float, ``[b, h, q, k]``, any strides.

    Returns:
        int32 ``[b, h, q, 3]``: ``(-first, last + 1, plain)``; ``(-k, 0, 1)`` for a row that sees no key.

    Raises:
        ValueError: not four dimensions, or another dtype.
    """
    return torch.ops.attnpatch.key_bounds(mask)


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
) -> AttentionCall:
    """Check the operator's arguments and return them as an :class:`AttentionCall`.

    Raises:
        ValueError: see :func:`attention`.
    """
    _check_qkv(q, k, v)
    rows = q.shape[:3]
    if attn_mask is not None:
        _check_mask_dtype(attn_mask, "attn_mask")
        attn_mask = _expanded("attn_mask", attn_mask, (*rows, k.shape[2]), "seqlen_k", q)
    if key_padding is not None:
        _check_padding(key_padding, (q.shape[0], k.shape[2]), q)
    if key_bounds is not None:
        if key_bounds.dtype != torch.int32:
            raise ValueError(f"key_bounds must be int32; got {key_bounds.dtype}")
        key_bounds = _expanded("key_bounds", key_bounds, (*rows, 3), "3", q)
    _check_per_head(sinks, alibi_slopes, q)
    offset: int | Tensor = q_offset
    if q_offset_tensor is not None:
        _check_offset(q_offset_tensor, q)
        offset = q_offset_tensor + q_offset if q_offset else q_offset_tensor
    masks = (attn_mask, key_padding, offset, window_left, window_right)
    return AttentionCall(q, k, v, sm_scale, *masks, softcap, key_bounds, sinks, alibi_slopes)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"q, k and v must be [batch, heads, seqlen, head_dim]; got {q.dim()}, {k.dim()} and {v.dim()} dimensions"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k and v must share one float dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device; got {q.device}, {k.device} and {v.device}")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v must share the batch size; got {q.shape[0]}, {k.shape[0]} and {v.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must share head_dim; got {q.shape[3]} and {k.shape[3]}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k and v must have the same number of heads; got {k.shape[1]} and {v.shape[1]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"the {q.shape[1]} heads of q are not a multiple of the {k.shape[1]} heads of k and v")
    torch._check(
        k.shape[2] == v.shape[2],
        lambda: f"k and v must have the same length; got {k.shape[2]} and {v.shape[2]}",
    )


def _expanded(name: str, x: Tensor, shape: tuple[int, int, int, int], last: str, q: Tensor) -> Tensor:
    """``x`` as a view of ``shape``, whose last dimension is called ``last``, or a ValueError that shows both."""
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, q on {q.device}")
    try:
        return x.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"{name} {tuple(x.shape)} does not broadcast to [batch, num_heads, seqlen_q, {last}] = {tuple(shape)}"
        ) from None


def _check_mask_dtype(mask: Tensor, name: str) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} must be bool (True = attend) or an additive float; got {mask.dtype}")


def _check_per_head(sinks: Tensor | None, alibi_slopes: Tensor | None, q: Tensor) -> None:
    batch, num_heads = q.shape[:2]
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


def _check_offset(q_offset: Tensor, q: Tensor) -> None:
    ok_shape = q_offset.dim() == 0 or (q_offset.dim() == 1 and q_offset.shape[0] in (1, q.shape[0]))
    if not ok_shape or q_offset.dtype not in (torch.int32, torch.int64) or q_offset.device != q.device:
        raise ValueError(
            f"q_offset_tensor must be int32 or int64 of shape [] or [batch={q.shape[0]}] on {q.device}; "
            f"got {q_offset.dtype} {tuple(q_offset.shape)} on {q_offset.device}"
        )


def _attention(*args: Any) -> Tensor:
    """Run on whichever backend takes it. ``args`` are those of :func:`attention`, in order."""
    return dispatch.run(_call(args), _names(args))


def _attention_lse(*args: Any) -> tuple[Tensor, Tensor]:
    call = _call(args)
    call = call._replace(lse=_new_lse(call))
    return dispatch.run(call, _names(args)), call.lse  # type: ignore[return-value]


def _call(args: tuple[Any, ...]) -> AttentionCall:
    return make_call(*args[:_NUM_ARGUMENTS])


def _names(args: tuple[Any, ...]) -> tuple[str, ...]:
    return _parsed(args[_NUM_ARGUMENTS]) if len(args) > _NUM_ARGUMENTS else ()


@cache
def _parsed(backends: str) -> tuple[str, ...]:
    return dispatch.check_names(backends.split(",")) if backends else ()


def _new_lse(call: AttentionCall) -> Tensor:
    return call.q.new_empty(call.q.shape[:3], dtype=torch.float32)


def _attention_fake(*args: Any) -> Tensor:
    call = _call(args)
    return new_output(call.q, call.v)


def _attention_lse_fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = _call(args)
    return new_output(call.q, call.v), _new_lse(call)


def _attention_backward(grad_o: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    from attnpatch.kernels.recompute.backward import attention_backward

    call = make_call(*args)
    grads = attention_backward(grad_o, grad_lse, call, _bias(args))
    return tuple(call.q.new_empty(0) if x is None else x for x in grads)


def _attention_backward_fake(grad_o: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    call = make_call(*args)
    wanted = (call.q, call.k, call.v, _bias(args), call.sinks, call.alibi_slopes)
    return tuple(call.q.new_empty(0) if x is None else torch.empty_like(x) for x in wanted)


def _bias(args: tuple[Any, ...]) -> Tensor | None:
    """The additive mask as the caller gave it: the one mask that can want a gradient."""
    attn_mask = args[4] if len(args) > 4 else None
    return attn_mask if attn_mask is not None and attn_mask.is_floating_point() else None


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    inputs = inputs[:_NUM_ARGUMENTS]
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
    ctx.constants = tuple(None if isinstance(x, Tensor) else x for x in inputs)


def _backward(ctx: Any, grad_o: Tensor, grad_lse: Tensor | None = None) -> tuple[Any, ...]:
    args = [c if t is None else t for t, c in zip(ctx.saved_tensors, ctx.constants, strict=True)]
    q, k, v, bias, sinks, alibi_slopes = torch.ops.attnpatch.attention_backward(grad_o, grad_lse, *args)
    grads = (q, k, v, None, bias, *(None,) * 7, sinks, alibi_slopes, None)
    return tuple(grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad, strict=False))


def _key_bounds(mask: Tensor) -> Tensor:
    from attnpatch.kernels.common.support import has_triton

    _check_mask(mask)
    if not (mask.is_cuda and has_triton()):
        return masking.key_bounds(mask)
    from attnpatch.kernels.key_bounds import launch

    return launch.key_bounds(mask)


def _key_bounds_fake(mask: Tensor) -> Tensor:
    _check_mask(mask)
    return mask.new_empty((*mask.shape[:3], 3), dtype=torch.int32)


def _check_mask(mask: Tensor) -> None:
    if mask.dim() != 4:
        raise ValueError(f"the mask of key_bounds must be [b, h, q, k]; got {tuple(mask.shape)}")
    _check_mask_dtype(mask, "the mask of key_bounds")


_OPERATORS = {
    "attention": (_attention, _attention_fake),
    "attention_lse": (_attention_lse, _attention_lse_fake),
    "attention_backward": (_attention_backward, _attention_backward_fake),
    "key_bounds": (_key_bounds, _key_bounds_fake),
}
for _name, (_run, _fake) in _OPERATORS.items():
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _device)
    torch.library.register_fake(f"attnpatch::{_name}", _fake, lib=_LIBRARY)
for _name in ("attention", "attention_lse"):
    torch.library.register_autograd(f"attnpatch::{_name}", _backward, setup_context=_save_inputs, lib=_LIBRARY)
