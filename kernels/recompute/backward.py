"""The backward of every backend: recompute BLOCK_M rows of the reference and differentiate them.

Never builds seqlen_q x seqlen_k; the widest temporary is ``[batch, num_heads, BLOCK_M, seqlen_k]`` in float32.
Correct for every term; a fused backward kernel will be faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.reference import attention_reference

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
        stop = min(start + BLOCK_M, call.seqlen_q)
        _add_rows(grads, tensors, grad_o[:, :, start:stop].to(wide), call, start, stop)
    out = [torch.empty_like(x).copy_(g) for x, g in zip(tensors, grads, strict=True)]
    return out[0], out[1], out[2], out[3] if bias is not None else call.q.new_empty((0,))


def _add_rows(
    grads: list[Tensor], tensors: list[Tensor], grad_o: Tensor, call: AttentionCall, start: int, stop: int
) -> None:
    """Add the gradients that rows ``start..stop`` of the output send to each tensor."""
    shape = (call.batch, call.num_heads, call.seqlen_q, call.seqlen_k)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in tensors]
        attn_mask = leaves[3].expand(shape) if len(leaves) == 4 else call.attn_mask
        part = call._replace(
            q=leaves[0][:, :, start:stop],
            k=leaves[1],
            v=leaves[2],
            attn_mask=None if attn_mask is None else attn_mask[:, :, start:stop],
            q_offset=call.q_offset + start,
        )
        o = attention_reference(part, grad_o.dtype)
    for total, grad in zip(grads, torch.autograd.grad(o, leaves, grad_o), strict=True):
        total += grad
