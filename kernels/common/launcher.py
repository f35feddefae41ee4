"""Launches that cost the host little.

``kernel[grid](...)`` works out from all its arguments, at every launch, what the kernel is specialised on: dtypes,
which arguments are None, which pointers and numbers are multiples of 16 or equal 1. On small tensors that takes longer
than the kernel. A :class:`Launch` belongs to one plan (:func:`support.planned`), so to calls that differ in nothing
but where their tensors lie; what is then left to look at is the addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

_VERSION = ".".join(triton.__version__.split(".")[:2])

KNOWN = ("3.6", "3.7", "3.8")
"""Versions of Triton that call a compiled kernel as :class:`Launch` does; under others all launches go through it."""

_STREAM = 3  # place of the stream among the arguments of a launcher


class Launch:
    """A kernel with its grid and all arguments but the addresses of its tensors.

    Addresses that are multiples of 16 where none was before, or the reverse, go through Triton, which compiles or
    finds the kernel for them; that kernel is remembered, and later ones are handed to it as Triton itself would.
    In Triton's interpreter, and while a profiler listens to its launches, all go through Triton.

    Args:
        kernel: a ``triton.jit`` function.
        programs: size of the grid's axis 0, the only one.
        call: the call of the plan, a NamedTuple; none of its tensors is kept.
        takes: its fields that the kernel takes. Those that hold None or a number do so in every later call.
        makes: the kernel's other tensors, each of one dtype: outputs, which whoever launches allocates.
        values: all other arguments by name, and num_warps, num_stages.
    """

    def __init__(
        self, kernel: Any, programs: int, call: Any, takes: Sequence[str], makes: Sequence[str], **values: Any
    ) -> None:
        fields = call._asdict()
        tensors = [name for name in takes if isinstance(fields[name], Tensor)]
        self._kernel = kernel
        self._programs = programs
        self._names = (*tensors, *makes)
        names = (*call._fields, *makes)
        self._places = [names.index(name) for name in self._names]
        self._values = {name: fields[name] for name in takes if name not in tensors} | values
        self._remembered: dict[int | tuple[bool, ...], _Ready] = {}

    def __call__(self, call: tuple[Any, ...], *made: Tensor) -> None:
        """Launch on the current stream of the tensors' device.

        Args:
            call: one that the plan serves.
            made: the tensors called ``makes``.
        """
        given = (*call, *made)
        device = given[self._places[0]].get_device()
        if device < 0 or device == torch.cuda.current_device():
            self._launch(device, given)
        else:
            with torch.cuda.device(device):
                self._launch(device, given)

    def _launch(self, device: int, given: tuple[Any, ...]) -> None:
        addresses = [given[place].data_ptr() for place in self._places]
        misaligned = reduce(or_, addresses) % 16 and tuple([address % 16 != 0 for address in addresses])
        ready = self._remembered.get(misaligned)
        runtime = knobs.runtime
        if ready is None or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            self._through_triton(misaligned, given)
        else:
            launcher, arguments, places, stream_of = ready
            arguments = arguments.copy()  # another thread may be launching, too
            arguments[_STREAM] = stream_of(device)
            for place, address in zip(places, addresses):  # noqa: B905  (strict costs: they are as many)
                arguments[place] = address
            launcher(*arguments)

    def _through_triton(self, misaligned: int | tuple[bool, ...], given: tuple[Any, ...]) -> None:
        arguments = {name: given[place] for name, place in zip(self._names, self._places, strict=True)}
        compiled = self._kernel[(self._programs,)](**arguments, **self._values)
        known = isinstance(self._kernel, JITFunction) and _VERSION in KNOWN
        if known and driver.active.get_current_target().backend == "cuda":
            self._remembered[misaligned] = self._ready(compiled)

    def _ready(self, compiled: Any) -> _Ready:
        launcher, constants = _launcher(compiled.run)
        handles = compiled.packed_metadata, None, None, None  # no metadata for hooks, and no hooks
        before = [self._programs, 1, 1, None, compiled.function, *constants, *handles]
        names = self._kernel.arg_names
        places = [len(before) + names.index(name) for name in self._names]
        arguments = [*before, *[self._values.get(name) for name in names]]
        return launcher, arguments, places, driver.active.get_current_stream


_Ready = tuple[Any, list[Any], list[int], Any]
"""A launcher, its arguments without stream and addresses, the places of the addresses, what knows the stream."""


def _launcher(run: Any) -> tuple[Any, tuple[Any, ...]]:
    """What launches a compiled kernel, and what it takes between the kernel's handle and its metadata.

    Triton 3.6's is written in C inside of one in Python, which allocates scratch memory for kernels that need any.
    """
    scratch = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if _VERSION == "3.6" and scratch == [0, 0]:
        return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)
    return run, ()
