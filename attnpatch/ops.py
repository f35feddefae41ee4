"""The operators that rewrites end in. Torch only, no Triton.

    attention            o
    attention_lse        o and the logarithm of the softmax's denominator
    attention_backward   of both
    key_bounds           a mask as the term of that name
    cache_write          new keys and values into caches, in place
    with_recent          K or V with its first and most recent tokens as they were
    recent_keys          which tokens these are
    merge                two attentions on different keys as one
    rotary               queries and keys turned by their positions
    linear               linear layers of one row

All others are functional (they write nothing they did not allocate), with one output layout. Defined through
``torch.library.Library`` and not ``custom_op``: dispatch costs 7 us that way instead of 17 us (torch 2.13, 2 cores).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._library.autograd import Info, make_autograd_impl

from attnpatch import dispatch, linear, masking, merging, recent, rotary, writing
from attnpatch.attention_call import AttentionCall, new_output
from attnpatch.checking import check_mask_dtype, known_call, make_call, views
from attnpatch.kernels.common.support import kind_of, plan_of
from attnpatch.writing import cache_write as cache_write

_TERMS = (
    "Tensor q, Tensor k, Tensor v, float sm_scale, Tensor? attn_mask=None, Tensor? key_padding=None, "
    "Tensor? q_offset_tensor=None, SymInt q_offset=0, SymInt? window_left=None, SymInt? window_right=None, "
    "float? softcap=None, Tensor? key_bounds=None, Tensor? sinks=None, Tensor? alibi_slopes=None"
)
_STORAGE = (
    "Tensor? block_table=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? k_shift=None, Tensor? v_shift=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, bool batch_invariant=False, "
    "str? prefill_dtype=None"
)
_NUM_TERMS, _NUM_ARGUMENTS = 14, 23
_LIBRARY = torch.library.Library("attnpatch", "DEF")
for _schema in (
    f"attention({_TERMS}, {_STORAGE}, str backends='') -> Tensor",
    f"attention_lse({_TERMS}, {_STORAGE}, str backends='') -> (Tensor, Tensor)",
    f"attention_backward(Tensor grad_o, Tensor? grad_lse, {_TERMS}) -> ({', '.join(['Tensor'] * 6)})",
    "key_bounds(Tensor mask) -> Tensor",
    writing.SCHEMA,
    *recent.SCHEMAS,
    merging.SCHEMA,
    rotary.SCHEMA,
    linear.SCHEMA,
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
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_shift: Tensor | None = None,
    v_shift: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    batch_invariant: bool = False,
    prefill_dtype: str | None = None,
    backends: str = "",
) -> Tensor:
    """Attention with its mask in terms; see :mod:`attnpatch.attention_call` for what each term means.

    Args:
        q: ``[batch, num_heads, seqlen_q, head_dim]``, any strides; ``[1, num_heads, total_q, head_dim]`` with
            cu_seqlens_q.
        k: ``[batch, num_kv_heads, seqlen_k, head_dim]``; num_heads is a multiple of num_kv_heads. With block_table,
            pages ``[num_pages, num_kv_heads, page_size, head_dim]``; with cu_seqlens_k,
            ``[1, num_kv_heads, total_k, head_dim]``. In q's dtype, or int8, float8_e4m3fn or float8_e5m2 with k_scale.
        v: likewise, of width head_dim_v, with v_scale.
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
        block_table: int32 or int64 ``[batch, num_blocks]``: the pages of each sequence's keys, in order; entries of
            keys that no row sees can be anything.
        k_scale: float32, broadcastable to ``k.shape[:3]``: k stands for ``k.float() * k_scale[..., None]``. Of uint8 k,
            the norms of TBQ4 codes; with k_shift, scales of integers of 4 bits: float ``[*k.shape[:3], num_groups]``.
        v_scale: likewise.
        k_shift: like k_scale: uint8 k holds two channels to a byte, the lower first, each of which stands for its
            integer times the scale of its group plus the shift of its group.
        v_shift: likewise.
        cu_seqlens_q: int32 ``[batch + 1]``, contiguous: where each sequence's rows begin in q, and their end. A causal
            term wants ``q_offset_tensor = attnpatch.attention_call.bottom_right_offset(cu_seqlens_q, seqlens_k)``.
        cu_seqlens_k: int32 ``[batch + 1]``: likewise for k and v.
        batch_invariant: a sequence's result does not depend, to the bit, on the others of the batch.
        prefill_dtype: "fp8" has a prefill multiply 8 bit floats where there is a kernel that does; None never.
        backends: comma-separated names that may run it; empty = all, in order of preference.

    Returns:
        ``[batch, num_heads, seqlen_q, head_dim_v]``, a view of contiguous ``[batch, seqlen_q, num_heads, head_dim_v]``;
        packed like q, with zeros in the rows of no sequence.

    Raises:
        NotImplementedError: in the backward, with block_table, k_scale, v_scale or cu_seqlens_q.
        ValueError: shapes, dtypes or devices do not fit; the message names them.
        attnpatch.errors.NoBackend: every backend allowed refuses.
    """
    masks = (attn_mask, key_padding, q_offset_tensor, q_offset, window_left, window_right)
    terms = (softcap, key_bounds, sinks, alibi_slopes)
    storage = (block_table, k_scale, v_scale, k_shift, v_shift, cu_seqlens_q, cu_seqlens_k)
    wishes = (batch_invariant, prefill_dtype)
    return torch.ops.attnpatch.attention(q, k, v, sm_scale, *masks, *terms, *storage, *wishes, backends)


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


def _attention(*args: Any) -> Tensor:
    """Run on whichever backend takes it. ``args`` are those of :func:`attention`, in order."""
    return dispatch.run(_call(args), _names(args))


def _attention_lse(*args: Any) -> tuple[Tensor, Tensor]:
    call = _call(args)
    call = call._replace(lse=_new_lse(call))
    return dispatch.run(call, _names(args)), call.lse  # type: ignore[return-value]


def _call(args: tuple[Any, ...]) -> AttentionCall:
    """Checked once per kind of arguments."""
    args = args[:_NUM_ARGUMENTS]
    kind = kind_of(args)
    return known_call(args, plan_of(kind, views, args), kind)


def _names(args: tuple[Any, ...]) -> tuple[str, ...]:
    return _parsed(args[_NUM_ARGUMENTS]) if len(args) > _NUM_ARGUMENTS else ()


@cache
def _parsed(backends: str) -> tuple[str, ...]:
    return dispatch.check_names(backends.split(",")) if backends else ()


def _new_lse(call: AttentionCall) -> Tensor:
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    return lse if call.cu_seqlens_q is None else lse.fill_(-torch.inf)


def _attention_fake(*args: Any) -> Tensor:
    call = make_call(*args[:_NUM_ARGUMENTS])
    return new_output(call.q, call.v)


def _attention_lse_fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = make_call(*args[:_NUM_ARGUMENTS])
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
    ctx.without_gradient = [n for n, x in zip(_NO_GRADIENT, inputs[_NUM_TERMS:], strict=False) if x is not None]
    inputs = inputs[:_NUM_TERMS]
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
    ctx.constants = tuple(None if isinstance(x, Tensor) else x for x in inputs)


_NO_GRADIENT = ("block_table", "k_scale", "v_scale", "k_shift", "v_shift", "cu_seqlens_q", "cu_seqlens_k")


def _backward(ctx: Any, grad_o: Tensor, grad_lse: Tensor | None = None) -> tuple[Any, ...]:
    if ctx.without_gradient:
        raise NotImplementedError(
            f"attention with {', '.join(ctx.without_gradient)} has no backward: run it under torch.no_grad(), or "
            "give it one dense K and V per sequence (gathered, dequantised, unpacked)"
        )
    args = [c if t is None else t for t, c in zip(ctx.saved_tensors, ctx.constants, strict=True)]
    q, k, v, bias, sinks, alibi_slopes = torch.ops.attnpatch.attention_backward(grad_o, grad_lse, *args)
    grads = (q, k, v, None, bias, *(None,) * 7, sinks, alibi_slopes, *(None,) * 10)
    return tuple(grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad, strict=False))


def _register_autograd(name: str, run: Callable[..., Any]) -> None:
    """:func:`torch.library.register_autograd`, whose two ways through the dispatcher a call without gradient is spared.

    Such a call goes straight to ``run`` where the dispatcher would go there next: on plain tensors, while no mode, no
    transform and no trace looks on.
    """
    formula = make_autograd_impl(getattr(torch.ops.attnpatch, name).default, Info(_backward, _save_inputs))

    def kernel(keyset: Any, *args: Any) -> Any:
        if keyset.raw_repr() in _PLAIN and not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            with torch._C._AutoDispatchBelowAutograd():
                return run(*args)
        return formula(keyset, *args)

    _LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


_PLAIN = frozenset(
    (DispatchKeySet(backend) | DispatchKeySet(autograd)).raw_repr()
    for backend, autograd in ((DispatchKey.CPU, DispatchKey.AutogradCPU), (DispatchKey.CUDA, DispatchKey.AutogradCUDA))
)
"""Dispatch keys of plain tensors where nothing else wants to see the call."""


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
    check_mask_dtype(mask, "the mask of key_bounds")


_OPERATORS = {
    "attention": (_attention, _attention_fake),
    "attention_lse": (_attention_lse, _attention_lse_fake),
    "attention_backward": (_attention_backward, _attention_backward_fake),
    "key_bounds": (_key_bounds, _key_bounds_fake),
    "cache_write": (writing.run, writing.fake),
    "merge": (merging.run, merging.fake),
    "rotary": (rotary.run, rotary.fake),
    "linear": (linear.run, linear.fake),
}
for _name, (_run, _fake) in _OPERATORS.items():
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _device)
    torch.library.register_fake(f"attnpatch::{_name}", _fake, lib=_LIBRARY)
for _name, _composite in recent.COMPOSITES.items():
    _LIBRARY.impl(_name, _composite, "CompositeImplicitAutograd")
for _name, _run in (("attention", _attention), ("attention_lse", _attention_lse)):
    _register_autograd(_name, _run)
