"""Rotary embeddings in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`attnpatch.rotary.rotary` of such arguments, which are checked already."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    turned = wide * cos.float() + torch.cat((-second, first), dim=-1) * sin.float()
    return torch.empty_like(x).copy_(turned)
