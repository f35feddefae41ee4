"""The operator that turns queries and keys by their positions, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnpatch.graph import is_one

SCHEMA = "rotary(Tensor[] xs, Tensor cos, Tensor sin) -> Tensor[]"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST = 2
"""Tensors of one call: queries and keys."""


def rotary(xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Rotary position embedding of rows whose two halves hold the pairs of channels that turn together.

    ``x * cos + cat(-x_2, x_1) * sin`` (Su et al., RoFormer, arXiv 2104.09864), computed in float32 and rounded once.

    Args:
        xs: one or two of float16, bfloat16 or float32, ``[a, b, c, channels]``, channels even and of one number, any
            strides: queries and keys.
        cos: likewise, broadcastable to each x.
        sin: likewise.

    Returns:
        For each x one of its shape and dtype, its dimensions in memory in x's order. Gradients do not pass.

    Raises:
        ValueError: shapes, dtypes or their number do not fit, or tensors are on different devices; the message names
            them.
    """
    return torch.ops.attnpatch.rotary(xs, cos, sin)


def run(xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """The operator: by Triton on a GPU, else in plain torch."""
    from attnpatch.kernels.common.support import has_triton

    check(xs, cos, sin)
    if not (xs[0].is_cuda and has_triton()):
        from attnpatch.kernels.rotary import reference

        return reference.rotary(xs, cos, sin)
    from attnpatch.kernels.rotary import launch

    return launch.rotary(xs, cos, sin)


def fake(xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """The operator on tensors without data."""
    check(xs, cos, sin)
    return [torch.empty_like(x) for x in xs]


def check(xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> None:
    """Raise what :func:`rotary` raises."""
    if not 1 <= len(xs) <= MOST:
        raise ValueError(f"rotary turns one or two tensors; got {len(xs)}")
    first = xs[0]
    for x in xs:
        if x.dim() != 4 or x.shape[3] % 2 or x.shape[3] != first.shape[-1]:
            shapes = ", ".join(str(tuple(x.shape)) for x in xs)
            raise ValueError(f"x of rotary must be [a, b, c, channels], channels even and of one number; got {shapes}")
        for name, t in (("cos", cos), ("sin", sin)):
            if not _fits(t, x):
                raise ValueError(f"{name} of rotary does not broadcast to x {tuple(x.shape)}; got {tuple(t.shape)}")
    for name, t in (*(("x", x) for x in xs), ("cos", cos), ("sin", sin)):
        if t.dtype not in DTYPES:
            raise ValueError(f"{name} of rotary must be float16, bfloat16 or float32; got {t.dtype}")
        if t.device != first.device:
            raise ValueError(f"{name} of rotary is on {t.device}, x on {first.device}; it needs all on one device")


def _fits(t: Tensor, x: Tensor) -> bool:
    """Whether ``t`` broadcasts to the shape of ``x``."""
    sizes = zip(reversed(t.shape), reversed(x.shape), strict=False)
    return t.dim() <= x.dim() and all(is_one(size) or size == whole for size, whole in sizes)
