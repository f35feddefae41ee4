"""One attention call as kernels see it: the tensors, and the mask as terms instead of a matrix.

Query row ``i`` sees key ``j`` of batch ``b`` if and only if all of these hold:

    i + q_offset - window_left <= j <= i + q_offset + window_right     (None: unbounded on that side)
    key_padding[b, j]
    attn_mask[b, h, i, j] does not exclude                             (see attnpatch.masking)
    first <= j < stop                                                  (key_bounds[b, h, i] = -first, stop, plain)

and its score is ``softcap(q_i . k_j * sm_scale) + attn_mask[b, h, i, j] - alibi_slopes[b, h] * |i + q_offset - j|``
(the mask only when additive), with ``softcap(s) = softcap * tanh(s / softcap)``. ``sinks[h]`` is one more score in the
softmax's denominator, of no key. A row that sees no key gives zeros, and -inf as its lse, sinks or not.
Head ``h`` of q reads head ``h // group_size`` of k and v.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PHASES = ("prefill", "decode", "append", "cross", "varlen")

MAX_APPEND = 64
"""Up to this many new queries on a longer K is an append: speculative verification, a chunk's tail."""


class AttentionCall(NamedTuple):
    """Arguments of one attention, validated and with its mask in terms (see the module's text).

    Args:
        q: ``[batch, num_heads, seqlen_q, head_dim]``, any strides.
        k: ``[batch, num_kv_heads, seqlen_k, head_dim]``, any strides, same dtype as q.
        v: ``[batch, num_kv_heads, seqlen_k, head_dim_v]``, any strides, same dtype as q.
        sm_scale: factor on q.k.
        attn_mask: bool (True = attend) or additive float, as a view of shape
            ``[batch, num_heads, seqlen_q, seqlen_k]`` (broadcast dimensions have stride 0), or None.
        key_padding: bool ``[batch, seqlen_k]``, True = a real key, or None.
        q_offset: position of query row 0 among the keys: an int, or an int32/int64 tensor on q's device of
            shape ``[]`` or ``[batch]``, so that its value may live on the device.
        window_left: keys visible left of a query's own position; None = all.
        window_right: keys visible right of it; 0 is causal; None = all.
        softcap: cap on the scaled scores, or None.
        key_bounds: int32, as a view of shape ``[batch, num_heads, seqlen_q, 3]`` (broadcast dimensions have stride 0),
            or None. ``plain = 1`` promises that key_padding and attn_mask hide nothing and add nothing in
            ``first <= j < stop``, so that a kernel need not read them. ``first`` is negated so that two bounds
            intersect by one ``torch.minimum``; neither has to lie in ``[0, seqlen_k]``.
        sinks: float ``[num_heads]``, in the units of the final scores, or None.
        alibi_slopes: float32 ``[num_heads]`` or ``[batch, num_heads]``, or None.
        lse: float32 ``[batch, num_heads, seqlen_q]``, contiguous: where the kernel writes the natural logarithm of the
            softmax's denominator; None when nobody asks.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sm_scale: float
    attn_mask: Tensor | None = None
    key_padding: Tensor | None = None
    q_offset: int | Tensor = 0
    window_left: int | None = None
    window_right: int | None = None
    softcap: float | None = None
    key_bounds: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    lse: Tensor | None = None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.k.shape[1]

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def seqlen_q(self) -> int:
        """Query rows per sequence."""
        return self.q.shape[2]

    @property
    def seqlen_k(self) -> int:
        """Keys per sequence: the capacity of K, not the number that is valid."""
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        """Width of q and k."""
        return self.q.shape[3]

    @property
    def head_dim_v(self) -> int:
        """Width of v and of the output."""
        return self.v.shape[3]

    @property
    def is_banded(self) -> bool:
        """Whether a causal or window term bounds the keys of a row."""
        return self.window_left is not None or self.window_right is not None

    @property
    def phase(self) -> str:
        """One of PHASES, from what the host sees: shapes and terms, never a value on the device."""
        seqlen_q, seqlen_k = self.q.shape[2], self.k.shape[2]
        if seqlen_q == 1:
            return "decode"
        per_row_mask = any(x is not None and x.stride(2) != 0 for x in (self.attn_mask, self.key_bounds))
        if seqlen_q != seqlen_k and self.window_right is None and not per_row_mask:
            return "cross"
        return "append" if seqlen_q <= MAX_APPEND and seqlen_k > seqlen_q else "prefill"

    def empty_output(self) -> Tensor:
        """Uninitialised output ``[batch, num_heads, seqlen_q, head_dim_v]`` in the layout of every backend.

        It is a view of a contiguous ``[batch, seqlen_q, num_heads, head_dim_v]``: what follows attention in
        nearly every model is ``transpose(1, 2).reshape(batch, seqlen_q, -1)``, which then copies nothing.
        """
        return new_output(self.q, self.v)


def new_output(q: Tensor, v: Tensor) -> Tensor:
    """See :meth:`AttentionCall.empty_output`; also the fake's output, so the strides agree."""
    batch, num_heads, seqlen_q, _ = q.shape
    return q.new_empty((batch, seqlen_q, num_heads, v.shape[3])).transpose(1, 2)


def position_offset(q_offset: int | Tensor, device: torch.device) -> Tensor:
    """``q_offset`` as an int64 tensor that broadcasts over ``[batch, 1, 1]``."""
    if isinstance(q_offset, Tensor):
        return q_offset.to(torch.int64).reshape(-1, 1, 1)
    return torch.tensor([[[q_offset]]], dtype=torch.int64, device=device)
