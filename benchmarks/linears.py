"""Suite ``linears``: the linear layers of a Llama layer for one row, with norms, activation and residuals between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness import DEVICE, PAST_L2, ROUNDS, Captured, interleave
from torch import Tensor

from attnpatch.linear import linear
from attnpatch.testing.tolerance import assert_same_function, run_float64

CASES = {"8B layer": (4096, 1024, 14336), "1B layer": (2048, 512, 8192)}
"""Channels, channels of K and of V, and of the gated unit."""
EPS = 1e-5


class Layer(NamedTuple):
    """A row and the weights it meets; attention between them is left out, and q taken for what it gives."""

    x: Tensor
    norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    norm_2: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def ours(t: Layer) -> Tensor:
    """Four launches."""
    q, _, _ = linear(t.x, [t.q, t.k, t.v], [None] * 3, t.norm, EPS)
    (x,) = linear(q, [t.o], [None], residual=t.x)
    (inner,) = linear(x, [t.gate, t.up], [None] * 2, t.norm_2, EPS, activation="silu")
    return linear(inner, [t.down], [None], residual=x)[0]


def by_torch(t: Layer) -> Tensor:
    """Thirteen, or more where the norm is not one."""
    y = F.rms_norm(t.x, t.x.shape[-1:], t.norm, EPS)
    q, _, _ = F.linear(y, t.q), F.linear(y, t.k), F.linear(y, t.v)
    x = t.x + F.linear(q, t.o)
    y = F.rms_norm(x, x.shape[-1:], t.norm_2, EPS)
    return x + F.linear(F.silu(F.linear(y, t.gate)) * F.linear(y, t.up), t.down)


IMPLEMENTATIONS: dict[str, Callable[[Layer], Tensor]] = {"attnpatch.linear": ours, "torch": by_torch}


def measure_linears(name: str, rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """Rows of a case; ``ms`` of one layer.

    Raises:
        AssertionError: ours is not as right as torch's.
    """
    given = layers(*CASES[name])
    errors = {impl: check(given[0], run) for impl, run in IMPLEMENTATIONS.items()}
    captured = {impl: Captured(run, given) for impl, run in IMPLEMENTATIONS.items()}
    read = sum(weight.numel() * weight.element_size() for weight in given[0][1:])
    for impl, by_clock in interleave(captured, rounds).items():
        for clock, ms in by_clock.items():
            row = {"suite": "linears", "case": name, "impl": impl, "ms": ms, "tbps": read / ms / 1e9}
            yield {**row, "rel_err": errors[impl], "clock": clock}


def run_linears_once(name: str) -> None:
    """Compile, and check."""
    check(layers(*CASES[name])[0], ours)


def check(layer: Layer, run: Callable[[Layer], Tensor]) -> float:
    """Assert the tolerance of the package; the largest error over the largest output."""
    found, exact = run(layer), run_float64(by_torch, layer)
    assert_same_function(found, by_torch(layer), exact)
    return float((found - exact).abs().max() / exact.abs().max())


def layers(width: int, kv: int, inner: int) -> list[Layer]:
    """Layers that are together larger than L2."""
    sizes = [(width,), (width, width), (kv, width), (kv, width), (width, width), (width,)]
    sizes += [(inner, width), (inner, width), (width, inner)]
    bytes_of_one = 2 * width * (2 * width + 2 * kv + 3 * inner)
    return [_layer(width, sizes) for _ in range(max(2, -(-PAST_L2 // bytes_of_one)))]


def _layer(width: int, sizes: list[tuple[int, ...]]) -> Layer:
    def random(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=DEVICE)

    return Layer(random(1, 1, width), *(random(*size) / (size[-1] ** 0.5 if size[1:] else 1) for size in sizes))
