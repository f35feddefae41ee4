"""The backward of every backend: recompute BLOCK_M rows of the scores, and write the gradients out.

    z  = softcap(q k^T * sm_scale) + bias - slope * |distance|        hidden keys excluded
    p  = exp(z) / l         l = sum_n exp(z) + exp(sink)              a sink's p_sink = exp(sink) / l has no value
    dv = p^T do             dp = do v^T
    dz = p (dp - delta)     delta = sum_n p dp - dlse                 the gradient of the bias
    dsink = -p_sink delta   dslope = -sum dz |distance|
    ds = dz (1 - tanh^2) * sm_scale                                   1 without a softcap
    dq = ds k               dk = ds^T q

Never builds seqlen_q x seqlen_k; the widest temporary is ``[batch, num_heads, BLOCK_M, seqlen_k]`` in float32.
Correct for every term; a fused backward kernel will be faster. Autograd itself is no help here: below a dispatch mode
(FlopCounterMode, selective checkpointing) it is switched off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.reference import hidden_keys
from attnpatch.masking import alibi_bias, distance, positions

BLOCK_M = 128


class Inputs(NamedTuple):
    """What can want a gradient, or the gradients themselves; None for a term that is not there."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None


def attention_backward(grad_o: Tensor, grad_lse: Tensor | None, call: AttentionCall, bias: Tensor | None) -> Inputs:
    """Gradients of an attention call.

    Args:
        grad_o: gradient of the output, ``[batch, num_heads, seqlen_q, head_dim_v]``.
        grad_lse: gradient of the lse, ``[batch, num_heads, seqlen_q]``, or None.
        call: the call.
        bias: the additive mask before it was expanded, or None.

    Returns:
        A gradient for each tensor of ``Inputs`` that the call has, in its dtype and shape.
    """
    inputs = Inputs(call.q, call.k, call.v, bias, call.sinks, call.alibi_slopes)
    wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    grads = Inputs._make(None if x is None else torch.zeros(x.shape, dtype=wide, device=x.device) for x in inputs)
    for start in range(0, call.seqlen_q, BLOCK_M):
        rows = slice(start, min(start + BLOCK_M, call.seqlen_q))
        _add_rows(grads, grad_o, grad_lse, call, rows)
    pairs = zip(inputs, grads, strict=True)
    return Inputs._make(None if x is None or g is None else torch.empty_like(x).copy_(g) for x, g in pairs)


def _row_call(call: AttentionCall, rows: slice) -> AttentionCall:
    """The call for some of its query rows."""
    mask, bounds = (None if x is None else x[:, :, rows] for x in (call.attn_mask, call.key_bounds))
    return call._replace(
        q=call.q[:, :, rows], attn_mask=mask, key_bounds=bounds, q_offset=call.q_offset + rows.start, lse=None
    )


def _add_rows(grads: Inputs, grad_o: Tensor, grad_lse: Tensor | None, call: AttentionCall, rows: slice) -> None:
    """Add the gradients that ``rows`` of the output send to each tensor."""
    wide, groups = grads.q.dtype, (call.num_kv_heads, call.group_size)
    part = _row_call(call, rows)
    hidden = hidden_keys(part).unflatten(1, groups)  # [batch, num_kv_heads, group_size, m, seqlen_k]
    unused = hidden.all(dim=3).all(dim=2)[..., None]  # an unwritten cache tail may hold NaN
    k, v = (x.to(wide).masked_fill(unused, 0.0)[:, :, None] for x in (call.k, call.v))
    q, do = (x.to(wide).unflatten(1, groups) for x in (part.q, grad_o[:, :, rows]))
    p, p_sink, slope = _probabilities(part, q, k, hidden)
    dp = (do @ v.transpose(-1, -2)).masked_fill(hidden, 0.0)
    delta = (p * dp).sum(dim=-1, keepdim=True)
    if grad_lse is not None:  # -inf where a row sees no key, whatever follows
        dlse = grad_lse[:, :, rows].to(wide).unflatten(1, groups)[..., None]
        delta = delta - dlse.masked_fill(hidden.all(dim=-1, keepdim=True), 0.0)
    dz = p * (dp - delta)
    ds = dz * slope * call.sm_scale
    grads.q[:, :, rows] += (ds @ k).flatten(1, 2)
    grads.k.add_((ds.transpose(-1, -2) @ q).sum(dim=2))
    grads.v.add_((p.transpose(-1, -2) @ do).sum(dim=2))
    _add_terms(grads, part, rows, dz.flatten(1, 2), (p_sink * delta).flatten(1, 2))


def _add_terms(grads: Inputs, part: AttentionCall, rows: slice, dz: Tensor, sunk: Tensor) -> None:
    """Add to the gradients of bias, slopes and sinks; ``sunk`` is p_sink delta, ``[batch, num_heads, m, 1]``."""
    if grads.bias is not None:
        total = grads.bias.view((1,) * (4 - grads.bias.dim()) + grads.bias.shape)
        total = total if total.shape[2] == 1 else total[:, :, rows]
        total += dz.sum_to_size(total.shape)
    if grads.alibi_slopes is not None:
        apart = distance(part, *positions(part)).abs()[:, None]
        grads.alibi_slopes.sub_((dz * apart).sum(dim=(2, 3)).sum_to_size(grads.alibi_slopes.shape))
    if grads.sinks is not None:
        grads.sinks.sub_(sunk.sum(dim=(0, 2, 3)))


def _probabilities(
    part: AttentionCall, q: Tensor, k: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor | float, Tensor | float]:
    """The probabilities of a block of rows (zeros where hidden), those of its sinks, and the softcap's derivative."""
    z = q @ k.transpose(-1, -2) * part.sm_scale
    slope: Tensor | float = 1.0
    if part.softcap is not None:
        t = torch.tanh(z / part.softcap)
        z, slope = part.softcap * t, 1.0 - t * t
    if part.attn_mask is not None and part.attn_mask.dtype != torch.bool:
        bias = part.attn_mask.to(z.dtype).unflatten(1, hidden.shape[1:3])
        z = z + bias.masked_fill(hidden, 0.0)
    if part.alibi_slopes is not None:
        z = z + alibi_bias(part, *positions(part), z.dtype).unflatten(1, hidden.shape[1:3])
    no_key = hidden.all(dim=-1, keepdim=True)
    z = z.masked_fill(hidden, -torch.inf).masked_fill(no_key, 0.0)
    if part.sinks is None:
        return z.softmax(dim=-1).masked_fill(hidden, 0.0), 0.0, slope
    sinks = part.sinks.to(z.dtype).view(*hidden.shape[1:3], 1, 1).expand(*z.shape[:-1], 1)
    p = torch.cat([z, sinks], dim=-1).softmax(dim=-1)
    return p[..., :-1].masked_fill(hidden, 0.0), p[..., -1:].masked_fill(no_key, 0.0), slope
