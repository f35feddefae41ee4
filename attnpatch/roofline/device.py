"""Devices: how fast they read memory and multiply matrices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A device.

    Args:
        name: for people.
        bandwidth: bytes per second of its memory.
        flops: FLOP per second of dense matrix products in bfloat16.
        source: where the two numbers are from.
    """

    name: str
    bandwidth: float
    flops: float
    source: str


DEVICES = {
    "a100-80gb": Device("NVIDIA A100 SXM 80 GB", 2.039e12, 312e12, "NVIDIA's data sheet"),
    "h100-sxm": Device("NVIDIA H100 SXM", 3.35e12, 989e12, "NVIDIA's data sheet"),
    "h200": Device("NVIDIA H200", 4.8e12, 989e12, "NVIDIA's data sheet"),
    "h200-read": Device(
        "NVIDIA H200", 4.5e12, 989e12, "a plain read of 4 GiB, docs/decode.md; FLOP/s of NVIDIA's data sheet"
    ),
    "l40s": Device("NVIDIA L40S", 0.864e12, 362.05e12, "NVIDIA's data sheet"),
    "mi300x": Device("AMD Instinct MI300X", 5.3e12, 1307.4e12, "AMD's data sheet"),
    "rtx-4090": Device("NVIDIA GeForce RTX 4090", 1.008e12, 165.2e12, "NVIDIA's Ada white paper, fp32 accumulation"),
}
"""Vendors' peaks, without sparsity; ``h200-read`` is what a read reaches of one of them."""


def measured_device(seconds: float = 0.5) -> Device:
    """The present device: a sum over memory past its caches, and a matrix product.

    The GPU, in bfloat16, where torch finds one, otherwise the CPU, in float32.

    Args:
        seconds: that each of the two is repeated for; the median counts.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    device, dtype, size = ("cuda", torch.bfloat16, 8192) if on_gpu else ("cpu", torch.float32, 1024)
    data = torch.ones(2**28 if on_gpu else 2**26, dtype=torch.float32, device=device)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    bandwidth = data.numel() * data.element_size() / _median_seconds("x.sum()", data, seconds)
    name = torch.cuda.get_device_name() if on_gpu else f"this CPU, {torch.get_num_threads()} threads"
    source = f"measured: the sum of {data.nbytes // 2**20} MiB, a product of {size} x {size} in {dtype}"
    return Device(name, bandwidth, 2 * size**3 / _median_seconds("x @ x", matrix, seconds), source)


def _median_seconds(statement: str, x: object, seconds: float) -> float:
    """Of one run, on all threads; torch's timer waits for the GPU around a block of runs."""
    import torch
    from torch.utils.benchmark import Timer

    timer = Timer(statement, globals={"x": x}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds).median
