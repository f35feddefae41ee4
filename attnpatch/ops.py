"""The operator every rewrite ends in, ``attnpatch::attention``, and its backward. Torch only, no Triton.

One functional operator (it writes nothing it did not allocate) with one output layout. Defined through
``torch.library.Library`` and not ``custom_op``: dispatch costs 7 us that way instead of 17 us (torch 2.13, 2 cores).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnpatch import dispatch
from attnpatch.attention_call import AttentionCall, new_output

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, float sm_scale, Tensor? attn_mask=None, Tensor? key_padding=None, "
    "Tensor? q_offset_tensor=None, SymInt q_offset=0, SymInt? window_left=None, SymInt? window_right=None, "
    "float? softcap=None"
)
_LIBRARY = torch.library.Library("attnpatch", "DEF")
_LIBRARY.define(f"attention({_ARGUMENTS}, str backends='') -> Tensor", tags=[torch.Tag.pt2_compliant_tag])
_LIBRARY.define(
    f"attention_backward(Tensor grad_o, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)


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
        backends: comma-separated names that may run it; empty = all, in order of preference.

    Returns:
        ``[batch, num_heads, seqlen_q, head_dim_v]``, a view of contiguous ``[batch, seqlen_q, num_heads, head_dim_v]``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; the message names them.
        attnpatch.errors.NoBackend: every backend allowed refuses.
    """
    terms = (attn_mask, key_padding, q_offset_tensor, q_offset, window_left, window_right, softcap)
    return torch.ops.attnpatch.attention(q, k, v, sm_scale, *terms, backends)


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
) -> AttentionCall:
    """Check the operator's arguments and return them as an :class:`AttentionCall`.

    Raises:
        ValueError: see :func:`attention`.
    """
    _check_qkv(q, k, v)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if attn_mask is not None:
        attn_mask = _expanded(attn_mask, shape, q)
    if key_padding is not None:
        _check_padding(key_padding, (q.shape[0], k.shape[2]), q)
    offset: int | Tensor = q_offset
    if q_offset_tensor is not None:
        _check_offset(q_offset_tensor, q)
        offset = q_offset_tensor + q_offset if q_offset else q_offset_tensor
    return AttentionCall(q, k, v, sm_scale, attn_mask, key_padding, offset, window_left, window_right, softcap)


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


def _expanded(attn_mask: Tensor, shape: tuple[int, int, int, int], q: Tensor) -> Tensor:
    """The mask as a view of the scores' shape, or a ValueError that shows both."""
    if attn_mask.device != q.device:
        raise ValueError(f"attn_mask is on {attn_mask.device}, q on {q.device}")
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise ValueError(f"attn_mask must be bool (True = attend) or an additive float; got {attn_mask.dtype}")
    try:
        return attn_mask.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"attn_mask {tuple(attn_mask.shape)} does not broadcast to "
            f"[batch, num_heads, seqlen_q, seqlen_k] = {tuple(shape)}"
        ) from None


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
    return dispatch.run(make_call(*args[:11]), _names(args[11]) if len(args) > 11 else ())


@cache
def _names(backends: str) -> tuple[str, ...]:
    return dispatch.check_names(backends.split(",")) if backends else ()


def _attention_fake(*args: Any) -> Tensor:
    call = make_call(*args[:11])
    return new_output(call.q, call.v)


def _attention_backward(grad_o: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from attnpatch.kernels.recompute.backward import attention_backward

    return attention_backward(grad_o, make_call(*args), _bias(args))


def _attention_backward_fake(grad_o: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call, bias = make_call(*args), _bias(args)
    grad_bias = call.q.new_empty((0,)) if bias is None else torch.empty_like(bias)
    return torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v), grad_bias


def _bias(args: tuple[Any, ...]) -> Tensor | None:
    """The additive mask as the caller gave it: the one mask that can want a gradient."""
    attn_mask = args[4] if len(args) > 4 else None
    return attn_mask if attn_mask is not None and attn_mask.is_floating_point() else None


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs[:11]))
    ctx.constants = tuple(None if isinstance(x, Tensor) else x for x in inputs[:11])


def _backward(ctx: Any, grad_o: Tensor) -> tuple[Any, ...]:
    args = [c if t is None else t for t, c in zip(ctx.saved_tensors, ctx.constants, strict=True)]
    grad_q, grad_k, grad_v, grad_bias = torch.ops.attnpatch.attention_backward(grad_o, *args)
    wants_bias = len(ctx.needs_input_grad) > 4 and ctx.needs_input_grad[4]  # arguments at their default are not there
    grads = (grad_q, grad_k, grad_v, None, grad_bias if wants_bias else None, *(None,) * 7)
    return grads[: len(ctx.needs_input_grad)]


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("attention", _attention, _device)
    _LIBRARY.impl("attention_backward", _attention_backward, _device)
torch.library.register_fake("attnpatch::attention", _attention_fake, lib=_LIBRARY)
torch.library.register_fake("attnpatch::attention_backward", _attention_backward_fake, lib=_LIBRARY)
torch.library.register_autograd("attnpatch::attention", _backward, setup_context=_save_inputs, lib=_LIBRARY)
