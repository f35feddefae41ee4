"""The operator that turns queries and keys by their positions, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from attnpatch.graph import is_one

SCHEMA = "rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of rows whose two halves hold the pairs of channels that turn together.

    ``x * cos + cat(-x_2, x_1) * sin`` (Su et al., RoFormer, arXiv 2104.09864), computed in float32 and rounded once.

    Args:
        x: float16, bfloat16 or float32, ``[a, b, c, channels]``, channels even, any strides.
        cos: likewise, broadcastable to x.
        sin: likewise.

    Returns:
        Of x's shape and dtype, its dimensions in memory in x's order. Gradients do not pass.

    Raises:
        ValueError: shapes or dtypes do not fit, or tensors are on different devices; the message names them.
    """
    return torch.ops.attnpatch.rotary(x, cos, sin)


def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The operator: by Triton on a GPU, else in plain torch."""
    from attnpatch.kernels.common.support import has_triton

    check(x, cos, sin)
    if not (x.is_cuda and has_triton()):
        from attnpatch.kernels.rotary import reference

        return reference.rotary(x, cos, sin)
    from attnpatch.kernels.rotary import launch

    return launch.rotary(x, cos, sin)


def fake(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The operator on tensors without data."""
    check(x, cos, sin)
    return torch.empty_like(x)


def check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise what :func:`rotary` raises."""
    if x.dim() != 4 or x.shape[3] % 2:
        raise ValueError(f"x of rotary must be [a, b, c, channels], channels even; got {tuple(x.shape)}")
    for name, t in (("x", x), ("cos", cos), ("sin", sin)):
        if t.dtype not in DTYPES:
            raise ValueError(f"{name} of rotary must be float16, bfloat16 or float32; got {t.dtype}")
        if t.device != x.device:
            raise ValueError(f"{name} of rotary is on {t.device}, x on {x.device}; it needs all on one device")
        if not _fits(t, x):
            raise ValueError(f"{name} of rotary does not broadcast to x {tuple(x.shape)}; got {tuple(t.shape)}")


def _fits(t: Tensor, x: Tensor) -> bool:
    """Whether ``t`` broadcasts to the shape of ``x``."""
    sizes = zip(reversed(t.shape), reversed(x.shape), strict=False)
    return t.dim() <= x.dim() and all(is_one(size) or size == whole for size, whole in sizes)
