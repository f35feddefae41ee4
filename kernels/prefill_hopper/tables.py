"""The tables of schedule.py on the device, one for all calls whose tiles cost the same.

Launches on any stream read them, and CUDA graphs, which keep no tensor alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from attnpatch.kernels.common.libcuda import allow_while_capturing
from attnpatch.kernels.prefill_hopper.schedule import assign

_in_graphs: set[Table] = set()
"""Those that a captured graph reads, for as long as the process lives: a graph does not say when it goes."""


class Table:
    """Which program computes which tiles.

    Args:
        tiles: as ``schedule.assign`` makes it, on the device.
        num_tiles: likewise.
    """

    def __init__(self, tiles: Tensor, num_tiles: Tensor) -> None:
        self._tensors = tiles, num_tiles
        self._streams: set[int] = set()
        self.programs, self.max_tiles = tiles.shape[0], tiles.shape[1] - 1

    def read(self) -> tuple[Tensor, Tensor]:
        """Both tensors, for a launch on the current stream of their device."""
        device = self._tensors[0].get_device()
        if device >= 0:
            self._outlive_readers(device)
        return self._tensors

    def _outlive_readers(self, device: int) -> None:
        """From now on, freeing the tensors waits for the current stream; what a graph captures is not freed."""
        if torch.cuda.is_current_stream_capturing():
            _in_graphs.add(self)
        elif torch._C._cuda_getCurrentRawStream(device) not in self._streams:
            stream = torch.cuda.current_stream(device)
            self._streams.add(stream.cuda_stream)
            for x in self._tensors:
                x.record_stream(stream)


@lru_cache(maxsize=256)
def table(costs: tuple[float, ...], batch: int, num_heads: int, section: int, device: torch.device) -> Table:
    """That of ``schedule.assign``, with a program for each multiprocessor that has something to do."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    programs = min(multiprocessors, len(costs) * batch * num_heads)
    return Table(*_on_device(assign(costs, batch, num_heads, section, programs), device))


def _on_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies, which are there when this returns.

    They are made in another thread on another stream: the caller's stream may be capturing, and what the caller's
    thread allocates may go to the memory of a CUDA graph, which is overwritten at each replay.
    """
    if device.type != "cuda":
        return [torch.from_numpy(x) for x in arrays]
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_copies, arrays, device).result()


def _copies(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    allow_while_capturing()
    with torch.cuda.stream(_stream(device)):
        return [torch.from_numpy(x).to(device) for x in arrays]


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
