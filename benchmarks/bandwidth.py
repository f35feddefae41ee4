"""Suite ``bandwidth``: how fast this GPU reads, so that other suites can be seen as a share of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from harness import DEVICE, ROUNDS, Captured, interleave
from torch import Tensor

CASES = ["read 4 GiB"]
BLOCK = 8192
PROGRAMS = 1056  # eight per multiprocessor of an H200
PARTS = 4


@triton.jit
def _read_kernel(x, sums, num_blocks, BLOCK: tl.constexpr):
    """Sum ``x``: each program takes every num_programs-th block, so that nothing but reads takes time."""
    acc = tl.zeros([BLOCK], tl.float32)
    for block in tl.range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        acc += tl.load(x + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(acc, axis=0))


def read(x: Tensor) -> Tensor:
    """Sums of parts of ``x``, float32, of a multiple of BLOCK and less than 2^31 elements."""
    sums = torch.empty(PROGRAMS, device=x.device)
    _read_kernel[(PROGRAMS,)](x, sums, x.numel() // BLOCK, BLOCK=BLOCK, num_warps=8)
    return sums


def measure_bandwidth(name: str, rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """Rows of a plain read of ``name``'s size, in parts one after the other.

    Raises:
        AssertionError: the sum is wrong, so that not everything was read.
    """
    parts = _parts(name)
    found = {"triton": read, "torch.sum": torch.sum}
    errors = {impl: _error(run(parts[0]), parts[0]) for impl, run in found.items()}
    captured = {impl: Captured(run, parts) for impl, run in found.items()}
    num_bytes = parts[0].numel() * 4
    for impl, by_clock in interleave(captured, rounds).items():
        for clock, ms in by_clock.items():
            row = {"suite": "bandwidth", "case": name, "impl": impl, "ms": ms, "tbps": num_bytes / ms / 1e9}
            yield {**row, "rel_err": errors[impl], "clock": clock}


def run_bandwidth_once(name: str) -> None:
    """Compile, and check."""
    _error(read(_parts(name)[0]), _parts(name)[0])


def _parts(name: str) -> list[Tensor]:
    """Random numbers in [0, 1) of ``name``'s size, PARTS tensors."""
    number, unit = name.split()[1:]
    elements = int(number) * {"KiB": 1 << 10, "GiB": 1 << 30}[unit] // 4
    return [torch.rand(elements // PARTS, device=DEVICE) for _ in range(PARTS)]


def _error(sums: Tensor, x: Tensor) -> float:
    total = x.sum(dtype=torch.float64)
    error = abs(float(sums.sum(dtype=torch.float64) / total) - 1)
    assert error < 1e-4, f"the sum is off by {error:.1e}"
    return error
