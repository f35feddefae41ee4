"""Linear layers and what stands around them, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    activation: str | None,
) -> list[Tensor]:
    """:func:`attnpatch.linear.linear` of such arguments, which are checked already."""
    wide = x.float()
    if norm is not None:
        wide = F.rms_norm(wide, wide.shape[-1:], norm.float(), eps)
    pairs = zip(weights, biases, strict=True)
    found = [F.linear(wide, weight.float(), None if bias is None else bias.float()) for weight, bias in pairs]
    if activation:
        found = [ACTIVATIONS[activation](found[0]) * found[1]]
    if residual is not None:
        found = [found[0] + residual.float()]
    return [y.to(x.dtype) for y in found]
