"""Host side of the kernel that merges two attentions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnpatch.attention_call import new_output
from attnpatch.kernels.common.launcher import Launch, overlapping, overlaps
from attnpatch.kernels.common.support import planned
from attnpatch.kernels.merge.kernel import _merge_kernel


class Merge(NamedTuple):
    """What the kernel reads."""

    o: Tensor
    lse: Tensor
    other: Tensor
    other_lse: Tensor
    sinks: Tensor | None


def merge(o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """:func:`attnpatch.merging.merge` of such arguments, which are checked already."""
    merged, merged_lse = new_output(o, o), torch.empty_like(lse)
    if o.numel() > 0:
        call = Merge(o, lse, other, other_lse, sinks)
        planned(_launch, call)(call, merged, merged_lse)
    return merged, merged_lse


def _launch(call: Merge) -> Launch:
    _, num_heads, seqlen_q, width = call.o.shape
    return Launch(
        _merge_kernel,
        call.lse.numel(),
        call,
        Merge._fields,
        ("merged", "merged_lse"),
        o_strides=call.o.stride(),
        other_strides=call.other.stride(),
        merged_strides=new_output(call.o.to("meta"), call.o.to("meta")).stride(),
        sinks_stride=None if call.sinks is None else call.sinks.stride(0),
        num_heads=num_heads,
        seqlen_q=seqlen_q,
        HEAD_DIM_V=width,
        BLOCK_D=1 << (width - 1).bit_length(),
        num_warps=1,
        **overlapping(overlaps(call.o.device)),
    )
