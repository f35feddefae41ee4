"""Host side of the rotary kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnpatch.kernels.common.launcher import Launch
from attnpatch.kernels.common.support import planned
from attnpatch.kernels.rotary.kernel import _rotary_kernel

ELEMENTS = 2048
"""Of one half of a program's rows, where there are many rows."""

FEW = 1024
"""Rows up to which each has a program of its own: a decode step is as short as its slowest program."""


class Rotary(NamedTuple):
    """What the kernel reads."""

    x: Tensor
    cos: Tensor
    sin: Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`attnpatch.rotary.rotary` of such arguments, which are checked already."""
    o = torch.empty_like(x)
    if o.numel() > 0:
        call = Rotary(x, cos.expand(x.shape), sin.expand(x.shape))
        planned(_launch, call)(call, o)
    return o


def _launch(call: Rotary) -> Launch:
    x, half = call.x, call.x.shape[3] // 2
    num_rows, block_h = x.numel() // x.shape[3], 1 << (half - 1).bit_length()
    block_r = 1 if num_rows <= FEW else max(1, ELEMENTS // block_h)
    return Launch(
        _rotary_kernel,
        -(-num_rows // block_r),
        call,
        Rotary._fields,
        ("o",),
        x_strides=x.stride(),
        cos_strides=call.cos.stride(),
        sin_strides=call.sin.stride(),
        o_strides=torch.empty_like(x, device="meta").stride(),
        size_1=x.shape[1],
        size_2=x.shape[2],
        num_rows=num_rows,
        HALF=half,
        BLOCK_R=block_r,
        BLOCK_H=block_h,
        num_warps=1 if block_r == 1 else 4,
    )
