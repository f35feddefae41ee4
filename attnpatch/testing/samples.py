"""Check a large attention on a few blocks of rows: the float64 reference of all of it would not fit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnpatch.attention_call import SCALES, AttentionCall
from attnpatch.kernels.dense import Index, sequence
from attnpatch.kernels.reference import attention_lse_reference, attention_reference
from attnpatch.testing.tolerance import assert_same_function

ROWS = 64


def samples(call: AttentionCall) -> Iterator[tuple[Index, AttentionCall]]:
    """First, middle and last ROWS rows of a first, a middle and a last head, and likewise of the sequences.

    Each as a call of its own, with its place in the output.
    """
    for b, h in sorted({(0, 0), (call.batch // 2, call.num_heads // 2), (call.batch - 1, call.num_heads - 1)}):
        place, part = sequence(call, b)
        first, seqlen_q = place[2].start or 0, part.seqlen_q
        for start in sorted({0, max(0, (seqlen_q - ROWS) // 2), max(0, seqlen_q - ROWS)}):
            rows, head = slice(start, min(start + ROWS, seqlen_q)), slice(h, h + 1)
            yield (place[0], head, slice(first + rows.start, first + rows.stop)), _part(part, head, rows)


def _part(call: AttentionCall, h: slice, rows: slice) -> AttentionCall:
    """Some rows of one head of a call of batch 1: views of the same tensors."""
    h_kv = slice(h.start // call.group_size, h.start // call.group_size + 1)
    return call._replace(
        q=call.q[:, h, rows],
        k=call.k[:, h_kv],
        v=call.v[:, h_kv],
        attn_mask=None if call.attn_mask is None else call.attn_mask[:, h, rows],
        q_offset=call.q_offset + rows.start,
        key_bounds=None if call.key_bounds is None else call.key_bounds[:, h, rows],
        sinks=None if call.sinks is None else call.sinks[h],
        alibi_slopes=None if call.alibi_slopes is None else call.alibi_slopes[..., h],
        lse=None if call.lse is None else call.lse[:, h, rows],
        **{name: x[:, h_kv] for name in SCALES if (x := getattr(call, name)) is not None},
    )


def check_samples(o: Tensor, call: AttentionCall) -> None:
    """Assert that the sampled rows of ``o`` are as right as a plain computation in the call's dtype."""
    for index, part in samples(call):
        o64, lse64 = attention_lse_reference(part)
        assert_same_function(o[index], attention_reference(part, call.q.dtype), o64, lse64 > -torch.inf)


def relative_error(o: Tensor, call: AttentionCall) -> float:
    """Largest ``||o - o64|| / ||o64||`` over the samples' rows that see a key."""
    errors = []
    for index, part in samples(call):
        o64, lse64 = attention_lse_reference(part)
        seen = lse64 > -torch.inf
        o64 = o64[seen]
        errors.append(torch.linalg.vector_norm(o[index][seen].double() - o64) / torch.linalg.vector_norm(o64))
    return max(error.item() for error in errors if not error.isnan())
