"""Linear layers and what stands around them, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from attnpatch.linear import Layers

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def linear(layers: Layers) -> list[Tensor]:
    """:func:`attnpatch.linear.linear` of such arguments, which are checked already."""
    x = layers.x.float()
    if layers.norm is not None:
        x = F.rms_norm(x, x.shape[-1:], layers.norm.float(), layers.eps)
    pairs = zip(layers.weights, layers.biases, strict=True)
    found = [F.linear(x, weight.float(), None if bias is None else bias.float()) for weight, bias in pairs]
    if layers.activation:
        found = [ACTIVATIONS[layers.activation](found[0]) * found[1]]
    if layers.residual is not None:
        found = [found[0] + layers.residual.float()]
    return [y.to(layers.x.dtype) for y in found]
