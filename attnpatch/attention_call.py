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

K and V may lie in pages (``block_table``), as integers, 8 bit floats or TBQ4 codes (``k_scale``, ``v_scale``; integers
of 4 bits have a ``k_shift``, ``v_shift`` too), and the sequences one behind the other (``cu_seqlens_q``,
``cu_seqlens_k``). Row ``i`` and key ``j`` then count within their sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PHASES = ("prefill", "decode", "append", "cross", "varlen")

MAX_APPEND = 64
"""Up to this many new queries on a longer K is an append: speculative verification, a chunk's tail."""

QUANTISED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of K and V that come with a scale per row."""

PACKED = torch.uint8
"""Dtype of K and V in 4 bits, two channels to a byte: integers where a shift is given, else TBQ4 codes."""


SCALES = ("k_scale", "v_scale", "k_shift", "v_shift")
"""Fields of a call that say what K and V mean where they are not in q's dtype."""


PREFILL_DTYPES = (None, "fp8")
"""What prefills may be rounded to; None is the model's dtype."""


class AttentionCall(NamedTuple):
    """Arguments of one attention, validated and with its mask in terms (see the module's text).

    Args:
        q: ``[batch, num_heads, seqlen_q, head_dim]``, any strides; packed, ``[1, num_heads, total_q, head_dim]``.
        k: ``[batch, num_kv_heads, seqlen_k, head_dim]``, any strides, in the dtype of q or one of QUANTISED; PACKED
            codes have ``head_dim // 2`` bytes. In pages, ``[num_pages, num_kv_heads, page_size, head_dim]``; packed,
            ``[1, num_kv_heads, total_k, head_dim]``.
        v: likewise, of width head_dim_v; quantised or not whatever k is.
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
            softmax's denominator; None when nobody asks. Of a packed q it holds -inf before.
        block_table: int32 or int64 ``[batch, num_blocks]``, any strides, or None. Key ``j`` of sequence ``b`` is row
            ``j % page_size`` of page ``block_table[b, j // page_size]``. The entry of keys that no row sees can be
            anything: kernels clamp it into ``[0, num_pages)``.
        k_scale: float32, as a view of shape ``k.shape[:3]`` (stride 0 over the keys: one per head), given exactly when
            k is quantised, of which it means ``k.float() * k_scale[..., None]``; or None. Of PACKED codes, the norms:
            float16 ``[*k.shape[:3], num_blocks]``, and it means ``attnpatch.tbq4.decode(k, k_scale, head_dim)``; with a
            k_shift, the scales: float ``[*k.shape[:3], num_groups]``.
        v_scale: likewise of v.
        k_shift: like k_scale in shape and dtype, or None: PACKED k holds integers from 0 to 15, channel 2b in the low 4
            bits of byte b, and channel c of them, in group ``c // (head_dim // num_groups)``, means
            ``integer * k_scale[.., group] + k_shift[.., group]``.
        v_shift: likewise of v.
        cu_seqlens_q: int32 ``[batch + 1]``, not decreasing, from 0: q is packed, and sequence ``b`` owns its rows
            ``cu_seqlens_q[b] <= i < cu_seqlens_q[b + 1]``; or None. Rows behind the last come back as zeros, -inf in
            lse. There is no attn_mask, key_padding or key_bounds then.
        cu_seqlens_k: int32 ``[batch + 1]``: K and V are packed too, and not in pages; or None.
        batch_invariant: the result of a sequence does not depend, to the bit, on the others of the batch.
        prefill_dtype: "fp8" allows a prefill to round q, k, v and the probabilities to float8_e4m3fn, with scales per
            head, of q per 128 rows of a head; None, the default, does not.
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
    block_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_shift: Tensor | None = None
    v_shift: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    batch_invariant: bool = False
    prefill_dtype: str | None = None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

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
        """Query rows per sequence; of all sequences when q is packed."""
        return self.q.shape[2]

    @property
    def page_size(self) -> int:
        """Keys per page, where there is a block_table."""
        return self.k.shape[2]

    @property
    def seqlen_k(self) -> int:
        """Keys per sequence: the capacity of K, not the number that is valid. Of all sequences when K is packed."""
        return self.k.shape[2] if self.block_table is None else self.block_table.shape[1] * self.page_size

    @property
    def head_dim(self) -> int:
        """Width of q and k."""
        return self.q.shape[3]

    @property
    def head_dim_v(self) -> int:
        """Width of v and of the output."""
        return width_of(self.v)

    @property
    def tbq4(self) -> tuple[bool, bool]:
        """Whether K, and whether V, is TBQ4 codes."""
        return is_tbq4(self.k, self.k_shift), is_tbq4(self.v, self.v_shift)

    @property
    def is_banded(self) -> bool:
        """Whether a causal or window term bounds the keys of a row."""
        return self.window_left is not None or self.window_right is not None

    @property
    def is_packed_prefill(self) -> bool:
        """Whether packed sequences have more rows than an append, on average: how many each has is on the device."""
        return self.cu_seqlens_q is not None and self.seqlen_q > MAX_APPEND * self.batch

    @property
    def phase(self) -> str:
        """One of PHASES, from what the host sees: shapes and terms, never a value on the device."""
        if self.cu_seqlens_q is not None:
            return "varlen"
        seqlen_q, seqlen_k = self.seqlen_q, self.seqlen_k
        if seqlen_q == 1:
            return "decode"
        per_row_mask = any(x is not None and x.stride(2) != 0 for x in (self.attn_mask, self.key_bounds))
        if seqlen_q != seqlen_k and self.window_right is None and not per_row_mask:
            return "cross"
        return "append" if seqlen_q <= MAX_APPEND and seqlen_k > seqlen_q else "prefill"

    @property
    def asks_for_fp8(self) -> bool:
        """Whether it is a prefill that may be computed on 8 bit floats."""
        prefills = self.phase in ("prefill", "cross") or self.is_packed_prefill
        return self.prefill_dtype == "fp8" and prefills

    def empty_output(self) -> Tensor:
        """Uninitialised output ``[batch, num_heads, seqlen_q, head_dim_v]`` in the layout of every backend.

        It is a view of a contiguous ``[batch, seqlen_q, num_heads, head_dim_v]``: what follows attention in
        nearly every model is ``transpose(1, 2).reshape(batch, seqlen_q, -1)``, which then copies nothing.
        Where q is packed it holds zeros, which rows of no sequence keep.
        """
        o = new_output(self.q, self.v)
        return o if self.cu_seqlens_q is None else o.zero_()


def new_output(q: Tensor, v: Tensor) -> Tensor:
    """See :meth:`AttentionCall.empty_output`; also the fake's output, so the strides agree."""
    batch, num_heads, seqlen_q, _ = q.shape
    width = width_of(v)
    strides = (seqlen_q * num_heads * width, width, num_heads * width, 1)
    return q.new_empty_strided((batch, num_heads, seqlen_q, width), strides)


def width_of(x: Tensor) -> int:
    """Channels of a row of K or V, of which PACKED codes hold two to a byte."""
    return x.shape[3] * 2 if x.dtype == PACKED else x.shape[3]


def is_tbq4(x: Tensor, shift: Tensor | None) -> bool:
    """Whether K or V of this shift is TBQ4 codes."""
    return x.dtype == PACKED and shift is None


def words_of_dtype(dtype: torch.dtype, has_shift: bool) -> str:
    """What K or V is, in a word or two."""
    if dtype == PACKED:
        return "int4" if has_shift else "TBQ4 codes"
    return str(dtype).removeprefix("torch.")


def position_offset(q_offset: int | Tensor, device: torch.device) -> Tensor:
    """``q_offset`` as an int64 tensor that broadcasts over ``[batch, 1, 1]``."""
    if isinstance(q_offset, Tensor):
        return q_offset.to(torch.int64).reshape(-1, 1, 1)
    return torch.tensor([[[q_offset]]], dtype=torch.int64, device=device)


def bottom_right_offset(cu_seqlens_q: Tensor, seqlens_k: int | Tensor) -> Tensor:
    """``q_offset`` that puts the last row of each packed sequence on its last key.

    Args:
        cu_seqlens_q: int32 ``[batch + 1]``.
        seqlens_k: keys of each sequence: int32 ``[batch]``, ``cu_seqlens_k.diff()`` where K is packed, or one number.

    Returns:
        int32 ``[batch]``.
    """
    return seqlens_k - cu_seqlens_q.diff()
