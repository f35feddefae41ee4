"""The operator of linear layers of one row, in one launch with what stands around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SCHEMA = (
    "linear(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor? norm=None, float eps=0.0, "
    "Tensor? residual=None, str? activation=None) -> Tensor[]"
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
MOST = 3
"""Weights of one call: queries, keys and values."""


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> list[Tensor]:
    """Linear layers of one row: ``W x + b`` for each weight, computed in float32 and rounded once.

    With ``norm``, of ``norm * x * rsqrt(mean(x^2) + eps)`` (Zhang and Sennrich, arXiv 1910.07467) in place of x. With
    ``residual``, plus that. With ``activation``, ``a(W_0 x + b_0) * (W_1 x + b_1)``, a gated unit (Shazeer, arXiv
    2002.05202).

    Args:
        x: float16, bfloat16 or float32, ``[1, .., 1, in_features]``.
        weights: one to three ``[out_features, in_features]``, contiguous, of x's dtype. On a GPU no kernel that runs
            right before may have written them: they are asked for before it has ended.
        biases: one ``[out_features]`` or None for each weight.
        norm: ``[in_features]``, or None.
        eps: of the norm.
        residual: ``[1, .., 1, out_features]``, of one weight, or of two with an activation; or None.
        activation: "silu", "gelu" or "gelu_tanh", of two weights of one shape; or None.

    Returns:
        ``[1, .., 1, out_features]`` per weight, or one with an activation. Gradients do not pass.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the activation is another; the message names them.
    """
    return torch.ops.attnpatch.linear(x, weights, biases, norm, eps, residual, activation)


class Layers(NamedTuple):
    """Arguments of :func:`linear`."""

    x: Tensor
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    norm: Tensor | None = None
    eps: float = 0.0
    residual: Tensor | None = None
    activation: str | None = None

    def new_outputs(self) -> list[Tensor]:
        """A row per weight, or one with an activation."""
        made = self.weights[:1] if self.activation else self.weights
        return [self.x.new_empty((*self.x.shape[:-1], weight.shape[0])) for weight in made]


def run(*args: Any) -> list[Tensor]:
    """The operator: by Triton on a GPU, else in plain torch."""
    from attnpatch.kernels.common.support import has_triton

    layers = Layers(*args)
    check(layers)
    if not (layers.x.is_cuda and has_triton()):
        from attnpatch.kernels.linear import reference

        return reference.linear(layers)
    from attnpatch.kernels.linear import launch

    return launch.linear(layers)


def fake(*args: Any) -> list[Tensor]:
    """The operator on tensors without data."""
    layers = Layers(*args)
    check(layers)
    return layers.new_outputs()


def check(layers: Layers) -> None:
    """Raise what :func:`linear` raises."""
    x, weights, biases, norm, _, residual, activation = layers
    if x.dim() == 0 or x.numel() != x.shape[-1] or x.numel() == 0 or x.dtype not in DTYPES:
        kinds = "float16, bfloat16 or float32"
        raise ValueError(f"x of linear must be one row in {kinds}; got {tuple(x.shape)} in {x.dtype}")
    if not 0 < len(weights) <= MOST or len(biases) != len(weights):
        counts = f"{len(weights)} and {len(biases)}"
        raise ValueError(f"linear takes 1 to {MOST} weights and a bias or None for each; got {counts}")
    if not all(weight.dim() == 2 and weight.shape[0] > 0 for weight in weights):
        raise ValueError(f"weights of linear have rows and columns; got {[tuple(weight.shape) for weight in weights]}")
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        _check_one(f"weight {i}", weight, (weight.shape[0], x.shape[-1]), x)
        _check_one(f"bias {i}", bias, weight.shape[:1], x)
    _check_one("norm", norm, x.shape[-1:], x)
    _check_one("residual", residual, (*x.shape[:-1], weights[0].shape[0]), x)
    _check_activation(weights, residual, activation)


def _check_one(name: str, t: Tensor | None, shape: Sequence[int], x: Tensor) -> None:
    if t is None:
        return
    if tuple(t.shape) != tuple(shape) or not t.is_contiguous():
        lies = "" if t.is_contiguous() else f" with strides {t.stride()}"
        raise ValueError(f"{name} of linear must be {tuple(shape)}, contiguous; got {tuple(t.shape)}{lies}")
    if (t.dtype, t.device) != (x.dtype, x.device):
        raise ValueError(f"{name} of linear is {t.dtype} on {t.device}, x {x.dtype} on {x.device}; it needs them alike")


def _check_activation(weights: Sequence[Tensor], residual: Tensor | None, activation: str | None) -> None:
    if activation is None:
        if residual is not None and len(weights) > 1:
            raise ValueError(f"residual of linear goes with one weight; got {len(weights)}")
    elif activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} of linear is not one of {', '.join(ACTIVATIONS)}")
    elif len(weights) != 2 or weights[0].shape != weights[1].shape:
        shapes = [tuple(weight.shape) for weight in weights]
        raise ValueError(f"an activation of linear takes two weights of one shape; got {shapes}")
