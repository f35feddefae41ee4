"""Tiled online softmax in plain torch (Milakov & Gimelshein, arXiv 1805.02867; tiles as in FlashAttention).

For each tile of BLOCK_M query rows, over tiles of BLOCK_N keys that the band lets it see:

    s     = q k^T * sm_scale, softcap, + biases, hidden -> -inf        [B, H, M, N], fp32
    m_new = max(m, max_n s);  p = exp(s - m_new);  alpha = exp(m - m_new)
    l     = alpha l + sum_n p;  acc = alpha acc + p v
    o     = acc / l  (l == 0: zeros);  lse = m + log(l)

Nothing of size seqlen_q x seqlen_k is ever built. It takes every call, the last resort on each device: the keys of a
tile are gathered from their pages, and multiplied out or decoded, tile by tile, so that no dense copy of K and V is
ever built either. Packed sequences and those of a batch_invariant call run alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnpatch.attention_call import SCALES, AttentionCall
from attnpatch.dispatch import Backend
from attnpatch.kernels.bands import key_range, without_idle_terms
from attnpatch.kernels.dense import dense, sequence
from attnpatch.masking import alibi_bias, excluded, visible_tile

BLOCK_M = 256
BLOCK_N = 1024


def tiled(call: AttentionCall) -> Tensor:
    """Run ``call`` with tiles of BLOCK_M x BLOCK_N scores; arithmetic in float32, or float64 for float64.

    Reads ``cu_seqlens_q`` and ``cu_seqlens_k``, ``key_bounds`` and a ``q_offset`` tensor on the host.
    """
    o = call.empty_output()
    if call.cu_seqlens_q is None and not call.batch_invariant:
        _write(o, call)
        return o
    for b in range(call.batch):
        place, part = sequence(call, b)
        _write(o[place], part)
    return o


def _write(o: Tensor, call: AttentionCall) -> None:
    """Write the output of sequences of one length."""
    call = without_idle_terms(call)
    for start in range(0, call.seqlen_q, BLOCK_M):
        rows = torch.arange(start, min(start + BLOCK_M, call.seqlen_q), device=call.q.device)
        o[:, :, start : start + BLOCK_M] = _row_tile(call, rows)


def _wide(call: AttentionCall) -> torch.dtype:
    return torch.promote_types(call.q.dtype, torch.float32)


def _row_tile(call: AttentionCall, rows: Tensor) -> Tensor:
    """Output of the given query rows, ``[batch, num_heads, m, head_dim_v]``; writes their lse if the call wants it."""
    wide = _wide(call)
    first, last = int(rows[0]), int(rows[-1])
    q = _grouped(call.q[:, :, first : last + 1], call).to(wide) * call.sm_scale
    m_i = q.new_full((*q.shape[:-1], 1), -torch.inf)
    l_i = torch.zeros_like(m_i)
    acc = q.new_zeros((*q.shape[:-1], call.head_dim_v))
    low, high = key_range(call, first, last)
    for start in range(low, high, BLOCK_N):
        keys = torch.arange(start, min(start + BLOCK_N, high), device=call.q.device)
        s, v = _score_tile(call, q, rows, keys)
        m_new = torch.maximum(m_i, s.amax(dim=-1, keepdim=True))
        m_safe = m_new.masked_fill(m_new == -torch.inf, 0.0)
        p = torch.exp(s - m_safe)
        alpha = torch.exp(m_i - m_safe)
        l_i = alpha * l_i + p.sum(dim=-1, keepdim=True)
        acc = alpha * acc + p @ v
        m_i = m_new
    no_key = m_i == -torch.inf
    m_i, l_i = m_i.masked_fill(no_key, 0.0), l_i.masked_fill(no_key, 1.0)
    if call.sinks is not None:
        m_i, l_i, acc = _with_sink(m_i, l_i, acc, _grouped(call.sinks.to(wide).view(1, -1, 1, 1), call))
    if call.lse is not None:
        lse = (m_i + l_i.log()).masked_fill(no_key, -torch.inf)
        call.lse[:, :, first : last + 1] = lse.flatten(1, 2)[..., 0]
    return (acc / l_i).flatten(1, 2)


def _with_sink(m_i: Tensor, l_i: Tensor, acc: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics and the accumulator with one more score, of no value, in every row."""
    top = torch.maximum(m_i, sinks)
    alpha = torch.exp(m_i - top)
    return top, alpha * l_i + torch.exp(sinks - top), alpha * acc


def _grouped(x: Tensor, call: AttentionCall) -> Tensor:
    """``[batch, num_heads, ...]`` as ``[batch, num_kv_heads, group_size, ...]``, a view."""
    return x.unflatten(1, (call.num_kv_heads, call.group_size))


def _score_tile(call: AttentionCall, q: Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores ``[batch, num_kv_heads, group_size, m, n]`` with hidden keys at -inf, and v of those keys."""
    low, high = int(keys[0]), int(keys[-1]) + 1
    k, v = (x[:, :, None].to(q.dtype) for x in _keys_and_values(call, low, high))
    s = q @ k.transpose(-1, -2)
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if call.alibi_slopes is not None:
        s = s + _grouped(alibi_bias(call, rows, keys, s.dtype), call)
    visible = visible_tile(call, rows, keys)
    if visible is not None:
        seen = _grouped(visible, call) if visible.shape[1] > 1 else visible[:, None]
        s = s.masked_fill(~seen, -torch.inf)
        v = _without_hidden_keys(v, seen)
    if call.attn_mask is not None:
        s = _add_mask(s, _grouped(call.attn_mask, call)[..., int(rows[0]) : int(rows[-1]) + 1, low:high])
    return s, v


def _keys_and_values(call: AttentionCall, low: int, high: int) -> tuple[Tensor, Tensor]:
    """K and V of keys ``[low, high)`` as they are multiplied, ``[batch, num_kv_heads, high - low, ..]``."""
    if call.block_table is not None:
        pages = slice(low // call.page_size, -(-high // call.page_size))
        part = dense(call._replace(block_table=call.block_table[:, pages]), _wide(call))
        own = slice(low % call.page_size, low % call.page_size + high - low)
        return part.k[:, :, own], part.v[:, :, own]
    stored = {name: x[:, :, low:high] for name in ("k", "v", *SCALES) if (x := getattr(call, name)) is not None}
    part = dense(call._replace(**stored), _wide(call))
    return part.k, part.v


def _without_hidden_keys(v: Tensor, seen: Tensor) -> Tensor:
    """Zero the value rows that no query of the tile sees: 0 * NaN from an unwritten cache tail is NaN."""
    hidden = ~seen.any(dim=3).any(dim=2, keepdim=True)  # [batch or 1, num_kv_heads or 1, 1, n]
    return v.masked_fill(hidden[..., None], 0.0)


def _add_mask(s: Tensor, attn_mask: Tensor) -> Tensor:
    """Apply a bool or additive mask tile."""
    hidden = excluded(attn_mask)
    if attn_mask.dtype != torch.bool:
        s = s + attn_mask.to(s.dtype)
    return s.masked_fill(hidden, -torch.inf)


def _refuses(call: AttentionCall) -> str | None:
    return None


BACKENDS = {
    "cpu.tiled": Backend("cpu.tiled", ("cpu",), _refuses, tiled),
    "sdpa.tiled": Backend("sdpa.tiled", ("cuda",), _refuses, tiled),
}
