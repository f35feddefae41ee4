"""Host side of the linear kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from attnpatch.kernels.common.launcher import Launch, overlapping, overlaps
from attnpatch.kernels.common.support import planned
from attnpatch.kernels.linear.kernel import _linear_kernel
from attnpatch.linear import Layers

BLOCK_K, NUM_WARPS = 1024, 4
"""With one row per program the fastest of six on the layers of an 8B and of a 1B Llama (H200, 2026-12-01)."""

MANY_ROWS = 65536
"""From here on a program has two: 128,256 of 2,048 take 115 us instead of 157 (H200, 2026-12-01)."""


class Linear(NamedTuple):
    """What the kernel reads, None for what is not there."""

    x: Tensor
    norm: Tensor | None
    w_0: Tensor
    w_1: Tensor | None
    w_2: Tensor | None
    b_0: Tensor | None
    b_1: Tensor | None
    b_2: Tensor | None
    residual: Tensor | None
    eps: float
    activation: str | None


def linear(layers: Layers) -> list[Tensor]:
    """:func:`attnpatch.linear.linear` of such arguments, which are checked already."""
    w_0, (w_1, w_2) = layers.weights[0], (*layers.weights[1:], None, None)[:2]
    b_0, b_1, b_2 = (*layers.biases, None, None)[:3]
    x, residual = layers.x.reshape(-1), None if layers.residual is None else layers.residual.reshape(-1)
    call = Linear(x, layers.norm, w_0, w_1, w_2, b_0, b_1, b_2, residual, layers.eps, layers.activation)
    outputs = layers.new_outputs()
    planned(_launch, call)(call, *outputs)
    return outputs


def _launch(call: Linear) -> Launch:
    in_features = call.w_0.shape[1]
    n_0, n_1, n_2 = sizes = [0 if w is None else w.shape[0] for w in (call.w_0, call.w_1, call.w_2)]
    made = ["y_0"] if call.activation else [f"y_{i}" for i, size in enumerate(sizes) if size]
    others: dict[str, Any] = {name: None for name in ("y_0", "y_1", "y_2") if name not in made}
    block_n = 1 if sum(sizes) < MANY_ROWS else 2
    return Launch(
        _linear_kernel,
        sum(-(-size // block_n) for size in sizes[: len(made)]),
        call,
        Linear._fields[:9],
        made,
        **others,
        eps=call.eps,
        n_0=n_0,
        n_1=n_1,
        n_2=n_2,
        K=in_features,
        ACTIVATION=call.activation,
        BLOCK_N=block_n,
        BLOCK_K=min(BLOCK_K, max(16, 1 << (in_features - 1).bit_length())),
        num_warps=NUM_WARPS,
        **overlapping(overlaps(call.x.device)),
    )
