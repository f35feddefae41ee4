"""The oracle of every attention kernel: the call's definition written out in float64.

Pages are gathered, quantised K and V multiplied out, packed sequences taken one by one (attnpatch.kernels.dense). Then

s = q k^T * sm_scale;  s = softcap * tanh(s / softcap);  s += bias - slope * |i + q_offset - j|
p = exp(s) / (sum over visible keys of exp(s) + exp(sink));  o = p v
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.dense import dense, sequences
from attnpatch.masking import alibi_bias, excluded, positions, visible_tile


def attention_reference(call: AttentionCall, dtype: torch.dtype = torch.float64) -> Tensor:
    """Compute ``call`` naively, with every N x N matrix spelled out.

    Args:
        call: the attention call.
        dtype: dtype of the arithmetic. float64 for an oracle; it is differentiable in any float dtype.

    Returns:
        ``[batch, num_heads, seqlen_q, head_dim_v]`` in ``dtype``; rows without a visible key are zeros.
    """
    return attention_lse_reference(call, dtype)[0]


def attention_lse_reference(call: AttentionCall, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """:func:`attention_reference`, and the lse ``[batch, num_heads, seqlen_q]``; both in ``dtype``."""
    if call.cu_seqlens_q is None:
        return _attention(dense(call, dtype), dtype)
    o = call.q.new_zeros((*call.q.shape[:3], call.head_dim_v), dtype=dtype)
    lse = call.q.new_full(call.q.shape[:3], -torch.inf, dtype=dtype)
    for place, part in sequences(call, dtype):
        o[place], lse[place] = _attention(part, dtype)
    return o, lse


def attention_fp8_reference(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """What ``prefill_dtype="fp8"`` may make of ``call``, everything else in float64.

    q, k and v are rounded to 8 bit floats, the largest number of a head of k and v, and of 128 rows of a head of q, to
    448, and probabilities in 256ths of the largest of their row; the softmax's denominator is the sum of those that are
    not rounded.

    Args:
        call: not packed, K and V dense.

    Returns:
        The output and the lse, as :func:`attention_lse_reference` returns them.
    """
    unused = hidden_keys(call).all(dim=2).all(dim=1)[:, None, :, None]
    k, v = (x.double().masked_fill(unused, 0.0) for x in (call.k, call.v))
    k, v = (_in_8_bits(x, (2, 3), 448.0) for x in (k, v))
    q = torch.cat([_in_8_bits(rows.double(), (2, 3), 448.0) for rows in call.q.split(128, dim=2)], dim=2)
    return _attention(call._replace(q=q, k=k, v=v), torch.float64, in_8_bits=True)


def _in_8_bits(x: Tensor, dims: tuple[int, ...], largest: float) -> Tensor:
    """Rounded, with the largest number over ``dims`` at ``largest``."""
    scale = x.abs().amax(dims, keepdim=True).clamp(min=1e-15) / largest
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _attention(call: AttentionCall, dtype: torch.dtype, in_8_bits: bool = False) -> tuple[Tensor, Tensor]:
    hidden = hidden_keys(call)
    # Select, do not multiply: 0 * NaN from an unwritten cache tail is NaN, forward and backward.
    unused = hidden.all(dim=2)[..., None]  # [batch, num_heads, seqlen_k, 1]
    k = call.k.to(dtype).repeat_interleave(call.group_size, dim=1).masked_fill(unused, 0.0)
    v = call.v.to(dtype).repeat_interleave(call.group_size, dim=1).masked_fill(unused, 0.0)
    scores = call.q.to(dtype) @ k.transpose(-1, -2) * call.sm_scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.attn_mask is not None and call.attn_mask.dtype != torch.bool:
        scores = scores + call.attn_mask.to(dtype).masked_fill(hidden, 0.0)
    if call.alibi_slopes is not None:
        scores = scores + alibi_bias(call, *positions(call), dtype)
    no_key = hidden.all(dim=-1, keepdim=True)
    scores = scores.masked_fill(hidden, -torch.inf).masked_fill(no_key, 0.0)
    if call.sinks is not None:
        sinks = call.sinks.to(dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    p = scores.softmax(dim=-1)[..., : call.seqlen_k].masked_fill(hidden, 0.0)
    if in_8_bits:
        p = _in_8_bits(p, (3,), 256.0)
    return p @ v, scores.logsumexp(dim=-1).masked_fill(no_key[..., 0], -torch.inf)


def hidden_keys(call: AttentionCall) -> Tensor:
    """Bool ``[batch, num_heads, seqlen_q, seqlen_k]``: True where a row must not see a key. Not of packed sequences."""
    shape = (call.batch, call.num_heads, call.seqlen_q, call.seqlen_k)
    hidden = torch.zeros(shape, dtype=torch.bool, device=call.q.device)
    visible = visible_tile(call, *positions(call))
    if visible is not None:
        hidden = hidden | ~visible
    if call.attn_mask is not None:
        hidden = hidden | excluded(call.attn_mask)
    return hidden
