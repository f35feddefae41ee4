"""Launches that cost the host little.

``kernel[grid](...)`` works out from all its arguments, at every launch, what the kernel is specialised on: dtypes,
which arguments are None, which pointers and numbers are multiples of 16 or equal 1. On small tensors that takes longer
than the kernel. A :class:`Launch` belongs to one plan (:func:`support.planned`), so to calls that differ in nothing
but where their tensors lie; what is then left to look at is the addresses, which go straight to the CUDA driver
(:mod:`attnpatch.kernels.common.driver`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from attnpatch.kernels.common.driver import driver_launch

_VERSION = ".".join(triton.__version__.split(".")[:2])

KNOWN = ("3.6", "3.7", "3.8")
"""Versions of Triton whose kernels take what :func:`driver_launch` gives; under others all launches go through it."""


class Launch:
    """A kernel with its grid and all arguments but the addresses of its tensors.

    Addresses that are multiples of 16 where none was before, or the reverse, go through Triton, which compiles or
    finds the kernel for them; that kernel is remembered, and later ones are handed to the driver as Triton itself
    would. In Triton's interpreter, and while a profiler listens to its launches, all go through Triton.

    Args:
        kernel: a ``triton.jit`` function.
        programs: size of the grid's axis 0, the only one.
        call: the call of the plan, a NamedTuple; none of its tensors is kept.
        takes: its fields that the kernel takes. Those that hold None or a number do so in every later call.
        makes: the kernel's other tensors, each of one dtype: outputs, which whoever launches allocates.
        then: the launch that follows, of the same call. What it makes begins with ``makes`` whatever the names.
        values: all other arguments by name, and num_warps, num_stages.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        call: Any,
        takes: Sequence[str],
        makes: Sequence[str],
        then: Launch | None = None,
        **values: Any,
    ) -> None:
        fields = call._asdict()
        tensors = [name for name in takes if isinstance(fields[name], Tensor)]
        names = (*call._fields, *makes)
        self._kernel = kernel
        self._programs = programs
        self._device = next(x.get_device() for x in call if isinstance(x, Tensor))
        self._names = (*tensors, *makes)
        self._places = [names.index(name) for name in self._names]
        self._values = {name: fields[name] for name in takes if name not in tensors} | values
        self._remembered: dict[int | tuple[bool, ...], Callable[[int, list[int]], int]] = {}
        self._then = then

    def __call__(self, call: tuple[Any, ...], *made: Tensor) -> None:
        """Launch, and what follows, on the current stream of the tensors' device.

        Args:
            call: one that the plan serves.
            made: the tensors called ``makes``.
        """
        given = (*call, *made)
        if self._device < 0 or self._device == torch._C._cuda_getDevice():
            self._launch(given)
        else:
            with torch.cuda.device(self._device):
                self._launch(given)

    def _launch(self, given: tuple[Any, ...]) -> None:
        addresses = [given[place].data_ptr() for place in self._places]
        misaligned = reduce(or_, addresses) % 16 and tuple([address % 16 != 0 for address in addresses])
        ready = self._remembered.get(misaligned)
        runtime = knobs.runtime
        if (
            ready is None
            or runtime.launch_enter_hook.calls
            or runtime.launch_exit_hook.calls
            or ready(self._device, addresses) != 0
        ):
            self._through_triton(misaligned, given)
        if self._then is not None:
            self._then._launch(given)

    def _through_triton(self, misaligned: int | tuple[bool, ...], given: tuple[Any, ...]) -> None:
        """Where the driver said no, Triton gives this thread its context and asks again, or raises what is wrong."""
        arguments = {name: given[place] for name, place in zip(self._names, self._places, strict=True)}
        compiled = self._kernel[(self._programs,)](**arguments, **self._values)
        known = isinstance(self._kernel, JITFunction) and _VERSION in KNOWN
        if known and driver.active.get_current_target().backend == "cuda":
            ready = driver_launch(compiled, self._programs, self._names, self._values, driver.active.get_current_stream)
            if ready is not None:
                self._remembered[misaligned] = ready
