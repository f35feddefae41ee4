"""Rotary embeddings in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rotary(xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """:func:`attnpatch.rotary.rotary` of such arguments, which are checked already."""
    return [_turned(x, cos.float(), sin.float()) for x in xs]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return torch.empty_like(x).copy_(wide * cos + torch.cat((-second, first), dim=-1) * sin)
