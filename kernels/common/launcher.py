"""Launches that cost the host little.

``kernel[grid](...)`` works out from all its arguments, at every launch, what the kernel is specialised on: dtypes,
which arguments are None, which pointers and numbers are multiples of 16 or equal 1. On small tensors that takes longer
than the kernel. A :class:`Launch` belongs to one plan (:func:`support.planned`), so to calls that differ in nothing
but where their tensors lie; what is then left to look at is the addresses, which go straight to the CUDA driver
(:mod:`attnpatch.kernels.common.driver`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from attnpatch.kernels.common.driver import Loaded, driver_launch
from attnpatch.kernels.common.support import capability
from attnpatch.kernels.common.tensor_map import Tiled

Described = Callable[[Tensor], Any]
"""Makes the descriptor that a kernel takes in place of a tensor, with zeros around it."""

_VERSION = ".".join(triton.__version__.split(".")[:2])

KNOWN = ("3.6", "3.7", "3.8")
"""Versions of Triton whose kernels take what :func:`driver_launch` gives; under others all launches go through it."""


class _Kernel(NamedTuple):
    """One kernel of a launch: which of the tensors given are its arguments of these names, and its other arguments."""

    function: Any
    programs: int
    places: dict[str, int]
    values: dict[str, Any]
    described: Mapping[str, Described]

    def launch(self, given: tuple[Any, ...]) -> Any:
        """Through Triton, which says what it has launched."""
        tensors = {name: given[place] for name, place in self.places.items()}
        return self.function[(self.programs,)](**{**tensors, **self.descriptors(given)}, **self.values)

    def descriptors(self, given: tuple[Any, ...]) -> dict[str, Any]:
        """Of the tensors that it takes so."""
        return {name: make(given[self.places[name]]) for name, make in self.described.items()}


class Launch:
    """A kernel with its grid and all arguments but the addresses of its tensors.

    Addresses that are multiples of 16 where none was before, or the reverse, go through Triton, which compiles or
    finds the kernel for them; that kernel is remembered, and later ones are handed to the driver as Triton itself
    would. In Triton's interpreter, and while a profiler listens to its launches, all go through Triton. So do those
    that the driver refuses: Triton gives a thread its context, and words the errors.

    Args:
        kernel: a ``triton.jit`` function. To launch it twice does no harm.
        programs: size of the grid's axis 0, the only one.
        call: the call of the plan, a NamedTuple; none of its tensors is kept.
        takes: its fields that the kernel takes. Those that hold None or a number do so in every later call.
        makes: the kernel's other tensors, each of one dtype: outputs, which whoever launches allocates; None in the
            place of one that it does not take.
        then: the launch that follows at once, of the same call. What it makes begins with what this one makes, by
            whatever names.
        described: those of the tensors that the kernel takes as descriptors. They lie at multiples of 16 bytes, always.
        values: all other arguments by name, and num_warps, num_stages.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        call: Any,
        takes: Sequence[str],
        makes: Sequence[str | None],
        then: Launch | None = None,
        described: Mapping[str, Described] = MappingProxyType({}),
        **values: Any,
    ) -> None:
        fields, names = call._asdict(), (*call._fields, *makes)
        tensors = [name for name in takes if isinstance(fields[name], Tensor)]
        places = {name: names.index(name) for name in (*tensors, *makes) if name is not None}
        values |= {name: fields[name] for name in takes if name not in tensors}
        self._kernels: tuple[_Kernel, ...] = (
            _Kernel(kernel, programs, places, values, described),
            *(then._kernels if then else ()),
        )
        self._places = sorted({place for kernel in self._kernels for place in kernel.places.values()})
        self._device = next(x.get_device() for x in call if isinstance(x, Tensor))
        self._remembered: dict[int | tuple[bool, ...], Callable[[int, list[int]], bool]] = {}

    def __call__(self, call: tuple[Any, ...], *made: Tensor) -> None:
        """Launch on the current stream of the tensors' device.

        Args:
            call: one that the plan serves.
            made: the tensors called ``makes``, by the last launch.
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
        hooks = knobs.runtime
        heard = hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls
        if ready is None or heard or not ready(self._device, addresses):
            self._through_triton(misaligned, given)

    def _through_triton(self, misaligned: int | tuple[bool, ...], given: tuple[Any, ...]) -> None:
        compiled = [kernel.launch(given) for kernel in self._kernels]
        functions = [kernel.function for kernel in self._kernels]
        if _is_known(functions):
            loaded = [self._loaded(given, *pair) for pair in zip(self._kernels, compiled, strict=True)]
            ready = driver_launch(loaded, len(self._places), driver.active.get_current_stream)
            if ready is not None:
                self._remembered[misaligned] = ready

    def _loaded(self, given: tuple[Any, ...], kernel: _Kernel, compiled: Any) -> Loaded:
        places = {name: self._places.index(place) for name, place in kernel.places.items()}
        descriptors = kernel.descriptors(given).items()
        tiled = {name: Tiled(x.base.data_ptr(), tuple(x.shape), tuple(x.strides)) for name, x in descriptors}
        return Loaded(compiled, kernel.programs, places, kernel.values, tiled)


def _is_known(functions: list[Any]) -> bool:
    """Whether the driver can be asked to launch what Triton has."""
    compiled = _VERSION in KNOWN and all(isinstance(function, JITFunction) for function in functions)
    return compiled and sys.platform == "linux" and driver.active.get_current_target().backend == "cuda"


def overlapping(overlapped: bool) -> dict[str, Any]:
    """Arguments of a kernel that starts up while the one before it still runs."""
    return {"PDL": overlapped, **({"launch_pdl": True} if overlapped else {})}


def overlaps(device: torch.device) -> bool:
    """Whether there is programmatic dependent launch: a kernel starts up while the one before it still runs."""
    return device.type == "cuda" and capability(device) >= (9, 0)
