"""Host side of the rotary kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnpatch.kernels.common.launcher import Launch, overlapping, overlaps
from attnpatch.kernels.common.support import planned
from attnpatch.kernels.rotary.kernel import _rotary_kernel

ELEMENTS = 2048
"""Of one half of a program's rows, where there are many rows."""

FEW = 1024
"""Rows up to which each has a program of its own: a decode step is as short as its slowest program."""


class Rotary(NamedTuple):
    """What the kernel reads; cosines and sines of the shape of what they turn."""

    x_0: Tensor
    cos_0: Tensor
    sin_0: Tensor
    x_1: Tensor | None = None
    cos_1: Tensor | None = None
    sin_1: Tensor | None = None


def rotary(xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """:func:`attnpatch.rotary.rotary` of such arguments, which are checked already."""
    outputs = [torch.empty_like(x) for x in xs]
    there = [(x, o) for x, o in zip(xs, outputs, strict=True) if o.numel() > 0]
    if there:
        call = Rotary(*[t for x, _ in there for t in (x, cos.expand(x.shape), sin.expand(x.shape))])
        planned(_launch, call)(call, *[o for _, o in there])
    return outputs


def _launch(call: Rotary) -> Launch:
    turned: list[Any] = [call[:3]] if call.x_1 is None else [call[:3], call[3:]]
    half = call.x_0.shape[3] // 2
    rows, block_h = [x.numel() // x.shape[3] for x, _, _ in turned], 1 << (half - 1).bit_length()
    block_r = 1 if sum(rows) <= FEW else max(1, ELEMENTS // block_h)
    strides = [tuple(t.stride() for t in (*given, torch.empty_like(given[0], device="meta"))) for given in turned]
    sizes = [(x.shape[1], x.shape[2], count) for (x, _, _), count in zip(turned, rows, strict=True)]
    absent: dict[str, Any] = {} if len(turned) == 2 else {"o_1": None}
    return Launch(
        _rotary_kernel,
        sum(-(-count // block_r) for count in rows),
        call,
        Rotary._fields,
        [f"o_{i}" for i in range(len(turned))],
        **absent,
        strides_0=strides[0],
        strides_1=strides[-1],
        sizes_0=sizes[0],
        sizes_1=sizes[-1],
        HALF=half,
        BLOCK_R=block_r,
        BLOCK_H=block_h,
        num_warps=1 if block_r == 1 else 4,
        **overlapping(overlaps(call.x_0.device)),
    )
