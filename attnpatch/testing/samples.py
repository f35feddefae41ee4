"""Check a large attention on a few blocks of rows: the float64 reference of all of it would not fit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.reference import attention_reference, hidden_keys
from attnpatch.testing.tolerance import assert_same_function

ROWS = 64

Index = tuple[slice, slice, slice]
"""Batch, heads and rows of an output."""


def samples(call: AttentionCall) -> Iterator[tuple[Index, AttentionCall]]:
    """First, middle and last ROWS rows of a first, a middle and a last head, each as a call of its own."""
    starts = sorted({0, (call.seqlen_q - ROWS) // 2, call.seqlen_q - ROWS}) if call.seqlen_q > ROWS else [0]
    heads = {(0, 0), (call.batch // 2, call.num_heads // 2), (call.batch - 1, call.num_heads - 1)}
    for b, h in sorted(heads):
        for start in starts:
            index = (slice(b, b + 1), slice(h, h + 1), slice(start, start + ROWS))
            yield index, slice_call(call, index)


def slice_call(call: AttentionCall, index: Index) -> AttentionCall:
    """The part of ``call`` that computes ``o[index]``, for one head: views of the same tensors."""
    b, h, rows = index
    h_kv = slice(h.start // call.group_size, h.start // call.group_size + 1)
    offset = call.q_offset
    if isinstance(offset, Tensor) and offset.dim() > 0:
        offset = offset[b]
    return call._replace(
        q=call.q[index],
        k=call.k[b, h_kv],
        v=call.v[b, h_kv],
        attn_mask=None if call.attn_mask is None else call.attn_mask[index],
        key_padding=None if call.key_padding is None else call.key_padding[b],
        q_offset=offset + rows.start,
        key_bounds=None if call.key_bounds is None else call.key_bounds[index],
        sinks=None if call.sinks is None else call.sinks[h],
        alibi_slopes=None if call.alibi_slopes is None else call.alibi_slopes.expand(call.batch, -1)[b, h],
        lse=None if call.lse is None else call.lse[index],
    )


def check_samples(o: Tensor, call: AttentionCall) -> None:
    """Assert that the sampled rows of ``o`` are as right as a plain computation in the call's dtype."""
    for index, part in samples(call):
        visible_rows = ~hidden_keys(part).all(dim=-1)
        original = attention_reference(part, call.q.dtype)
        assert_same_function(o[index], original, attention_reference(part), visible_rows)


def relative_error(o: Tensor, call: AttentionCall) -> float:
    """Largest ``||o - o64|| / ||o64||`` over the samples' rows that see a key."""
    errors = []
    for index, part in samples(call):
        seen = ~hidden_keys(part).all(dim=-1)
        o64 = attention_reference(part)[seen]
        errors.append(torch.linalg.vector_norm(o[index][seen].double() - o64) / torch.linalg.vector_norm(o64))
    return max(error.item() for error in errors if not error.isnan())
