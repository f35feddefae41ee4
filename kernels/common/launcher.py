"""Launches that cost the host little.

``kernel[grid](...)`` works out from all its arguments, at every launch, what the kernel is specialised on: dtypes,
which arguments are None, which pointers and numbers are multiples of 16 or equal 1. On small tensors that takes longer
than the kernel. A :class:`Launch` fixes everything but the tensors; what is then left to look at is little.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class Launch:
    """A kernel with its grid and all arguments but the leading ones, which are tensors (or None, or integers).

    Leading arguments of new dtypes, alignments or numbers, or on a new device, go through Triton, which compiles or
    finds the kernel for them; that kernel is remembered, and later ones are handed to it as Triton itself would.
    In Triton's interpreter, and while a profiler listens to its launches, all go through Triton.

    Args:
        kernel: a ``triton.jit`` function.
        programs: size of the grid's axis 0, the only one.
        values: the arguments after the leading ones by name, and num_warps, num_stages. Every launch uses them, so a
            Launch belongs to one set of strides and sizes; :func:`support.planned` keeps one for each.
    """

    def __init__(self, kernel: Any, programs: int, **values: Any) -> None:
        self._kernel = kernel
        self._programs = programs
        self._values = values
        self._remembered: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, *leading: Tensor | int | None) -> None:
        """Launch on the current stream of the device of ``leading[0]``, a tensor."""
        device = leading[0].get_device()  # type: ignore[union-attr]
        if device < 0 or device == torch.cuda.current_device():
            self._launch(device, leading)
        else:
            with torch.cuda.device(device):
                self._launch(device, leading)

    def _launch(self, device: int, leading: tuple[Tensor | int | None, ...]) -> None:
        key: list[Any] = [device]
        addresses: list[int | None] = []
        for x in leading:
            if x is not None and isinstance(x, Tensor):  # isinstance alone is slow to say no
                addresses.append(address := x.data_ptr())
                key += (x.dtype, address % 16 == 0)
            else:
                addresses.append(x)
                key.append(x)
        remembered = self._remembered.get(tuple(key))
        hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if remembered is None or hooks[0].calls or hooks[1].calls:
            self._through_triton(tuple(key), leading)
        else:
            run, stream_of, handles, values = remembered
            run(self._programs, 1, 1, stream_of(device), *handles, None, None, None, *addresses, *values)

    def _through_triton(self, key: tuple[Any, ...], leading: tuple[Tensor | int | None, ...]) -> None:
        compiled = self._kernel[(self._programs,)](*leading, **self._values)
        if isinstance(self._kernel, JITFunction) and driver.active.get_current_target().backend == "cuda":
            handles = compiled.function, compiled.packed_metadata
            values = [self._values[name] for name in self._kernel.arg_names[len(leading) :]]
            self._remembered[key] = (compiled.run, driver.active.get_current_stream, handles, values)
