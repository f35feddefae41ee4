"""The backward of every backend: recompute BLOCK_M rows of the scores, and write the gradients out.

    p  = softmax(z)         z = softcap(q k^T * sm_scale) + bias,  hidden keys excluded
    dv = p^T do             dp = do v^T
    dz = p (dp - sum_n p dp)                       the gradient of the bias
    ds = dz (1 - tanh^2) * sm_scale                1 without a softcap
    dq = ds k               dk = ds^T q

Never builds seqlen_q x seqlen_k; the widest temporary is ``[batch, num_heads, BLOCK_M, seqlen_k]`` in float32.
Correct for every term; a fused backward kernel will be faster. Autograd itself is no help here: below a dispatch mode
(FlopCounterMode, selective checkpointing) it is switched off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.reference import hidden_keys

BLOCK_M = 128


def attention_backward(
    grad_o: Tensor, call: AttentionCall, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of an attention call.

    Args:
        grad_o: gradient of the output, ``[batch, num_heads, seqlen_q, head_dim_v]``.
        call: the call.
        bias: the additive mask before it was expanded, or None.

    Returns:
        Gradients of q, k, v and bias (of ``[0]`` when there is none), each in its tensor's dtype and shape.
    """
    wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    tensors = [call.q, call.k, call.v] + ([] if bias is None else [bias])
    grads = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in tensors]
    for start in range(0, call.seqlen_q, BLOCK_M):
        _add_rows(grads, grad_o, call, start, min(start + BLOCK_M, call.seqlen_q))
    out = [torch.empty_like(x).copy_(g) for x, g in zip(tensors, grads, strict=True)]
    return out[0], out[1], out[2], out[3] if bias is not None else call.q.new_empty((0,))


def _add_rows(grads: list[Tensor], grad_o: Tensor, call: AttentionCall, start: int, stop: int) -> None:
    """Add the gradients that rows ``start..stop`` of the output send to each tensor."""
    wide, groups = grads[0].dtype, (call.num_kv_heads, call.group_size)
    rows = slice(start, stop)
    mask = None if call.attn_mask is None else call.attn_mask[:, :, rows]
    part = call._replace(q=call.q[:, :, rows], attn_mask=mask, q_offset=call.q_offset + start)
    hidden = hidden_keys(part).unflatten(1, groups)  # [batch, num_kv_heads, group_size, m, seqlen_k]
    unused = hidden.all(dim=3).all(dim=2)[..., None]  # an unwritten cache tail may hold NaN
    k, v = (x.to(wide).masked_fill(unused, 0.0)[:, :, None] for x in (call.k, call.v))
    q, do = (x.to(wide).unflatten(1, groups) for x in (part.q, grad_o[:, :, rows]))
    p, slope = _probabilities(part, q, k, hidden)
    dp = (do @ v.transpose(-1, -2)).masked_fill(hidden, 0.0)
    dz = p * (dp - (p * dp).sum(dim=-1, keepdim=True))
    ds = dz * slope * call.sm_scale
    grads[0][:, :, rows] += (ds @ k).flatten(1, 2)
    grads[1] += (ds.transpose(-1, -2) @ q).sum(dim=2)
    grads[2] += (p.transpose(-1, -2) @ do).sum(dim=2)
    if len(grads) == 4:
        total = grads[3].view((1,) * (4 - grads[3].dim()) + grads[3].shape)
        total = total if total.shape[2] == 1 else total[:, :, rows]
        total += dz.flatten(1, 2).sum_to_size(total.shape)


def _probabilities(part: AttentionCall, q: Tensor, k: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | float]:
    """The probabilities of a block of rows (zeros where hidden), and the softcap's derivative."""
    z = q @ k.transpose(-1, -2) * part.sm_scale
    slope: Tensor | float = 1.0
    if part.softcap is not None:
        t = torch.tanh(z / part.softcap)
        z, slope = part.softcap * t, 1.0 - t * t
    if part.attn_mask is not None and part.attn_mask.dtype != torch.bool:
        bias = part.attn_mask.to(z.dtype).unflatten(1, hidden.shape[1:3])
        z = z + bias.masked_fill(hidden, 0.0)
    no_key = hidden.all(dim=-1, keepdim=True)
    p = z.masked_fill(hidden, -torch.inf).masked_fill(no_key, 0.0).softmax(dim=-1)
    return p.masked_fill(hidden, 0.0), slope
