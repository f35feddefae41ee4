"""Launch kernels that Triton has compiled and loaded by one call each of the CUDA driver.

Triton's own launcher parses all arguments of the kernel at every launch. Here all but the addresses of tensors are
laid out once, just as it lays them out (``_launch`` in triton/backends/nvidia/driver.py or driver.c): each argument
that is no constant, tuples flattened, in order and as wide as the kernel's signature says, then two pointers to scratch
memory. A tensor descriptor is a map for the TMA unit, then shape and strides. ``cuLaunchKernelEx`` copies them all
before it returns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

from attnpatch.kernels.common import libcuda
from attnpatch.kernels.common.tensor_map import TensorMap, Tiled

_TYPES: dict[str, Any] = {
    "i1": ctypes.c_int8,
    "u1": ctypes.c_uint8,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}
"""What Python's numbers are to a kernel."""

_MAX_SHARED = 228 << 10  # bytes; more needs an attribute, from Triton 3.8 on
_SCRATCH = 2  # pointers
_MAP = "nvTmaDesc"
"""Kind of a map, as Triton's launchers call it."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint32), ("value", ctypes.c_uint64 * 8))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint32),
    )


_OVERLAPS = _Attribute(6, (1,))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Loaded(NamedTuple):
    """A kernel that Triton has launched, and all that it takes.

    Args:
        compiled: what the launch returned.
        programs: size of the grid.
        places: its arguments that are tensors, and where among the addresses of a launch theirs come.
        values: its other arguments by name.
        tiled: of the tensors, those that it takes as descriptors.
    """

    compiled: Any
    programs: int
    places: dict[str, int]
    values: dict[str, Any]
    tiled: Mapping[str, Tiled] = MappingProxyType({})


def driver_launch(
    kernels: Sequence[Loaded], num_addresses: int, stream_of: Callable[[int], int]
) -> Callable[[int, Sequence[int]], bool] | None:
    """What launches ``kernels`` one after the other, or None when one of them needs more than is known here.

    Args:
        kernels: at least one.
        num_addresses: how many addresses a launch is given.
        stream_of: the current stream of a device.

    Returns:
        A function of a device, which is the current one, and of addresses; it says whether the driver took them all.
    """
    if not all(_is_plain(kernel) for kernel in kernels):
        return None
    addresses: Any = (ctypes.c_uint64 * num_addresses)()
    maps = [_maps(kernel) for kernel in kernels]
    if not all(each.usable for of_kernel in maps for each in of_kernel.values()):
        return None
    launches = [_launch(kernel, addresses, of_kernel) for kernel, of_kernel in zip(kernels, maps, strict=True)]
    moves = [(each.move, place) for of_kernel in maps for place, each in of_kernel.items()]
    lock = Lock()

    def launch(device: int, given: Sequence[int]) -> bool:
        with lock:  # another thread may be launching, too
            addresses[:] = given
            for move, place in moves:
                if move(given[place]) != 0:
                    return False
            stream = stream_of(device)
            for config, cu_launch in launches:
                config.stream = stream
                if cu_launch() != 0:
                    return False
            return True

    return launch


def _is_plain(kernel: Loaded) -> bool:
    """Whether the kernel needs no scratch memory, no cluster, no cooperative grid, and takes what _TYPES has."""
    facts = kernel.compiled.metadata
    scratch = facts.global_scratch_size or facts.profile_scratch_size
    special = scratch or facts.launch_cooperative_grid or facts.num_ctas != 1 or facts.shared > _MAX_SHARED
    described = len(_forms(kernel)) == len(kernel.tiled)
    return (
        described and not special and all(kind in (*_TYPES, _MAP) or kind[0] == "*" for kind, _ in _arguments(kernel))
    )


def _maps(kernel: Loaded) -> dict[int, TensorMap]:
    """Those that the kernel takes, by the place of their address; Triton lists their forms in the same order."""
    taken = [name for name in kernel.compiled.src.signature if name in kernel.tiled]
    pairs = zip(taken, _forms(kernel), strict=True)
    return {kernel.places[name]: TensorMap(kernel.tiled[name], form) for name, form in pairs}


def _forms(kernel: Loaded) -> Sequence[dict[str, Any]]:
    """What each descriptor was compiled for."""
    return getattr(kernel.compiled.metadata, "tensordesc_meta", None) or ()


def _launch(kernel: Loaded, addresses: Any, maps: Mapping[int, TensorMap]) -> tuple[_Config, Callable[[], int]]:
    """What holds the stream, and cuLaunchKernelEx with all its arguments."""
    config, parameters = _config(kernel), _parameters(kernel, addresses, maps)
    function = ctypes.c_void_p(kernel.compiled.function)
    return config, partial(_cu_launch(), ctypes.byref(config), function, parameters, None)


def _cu_launch() -> Any:
    return libcuda.function("cuLaunchKernelEx")


def _config(kernel: Loaded) -> _Config:
    facts = kernel.compiled.metadata
    attributes = [_OVERLAPS] if facts.launch_pdl else []
    array = (_Attribute * len(attributes))(*attributes)
    return _Config((kernel.programs, 1, 1), (32 * facts.num_warps, 1, 1), facts.shared, None, array, len(attributes))


def _parameters(kernel: Loaded, addresses: Any, maps: Mapping[int, TensorMap]) -> Any:
    """``void**``: where each argument lies."""
    arguments = _arguments(kernel)
    numbers = (ctypes.c_uint64 * (len(arguments) + _SCRATCH))()
    where = [ctypes.addressof(numbers) + 8 * place for place in range(len(numbers))]
    for place, (kind, value) in enumerate(arguments):
        if kind == _MAP:
            where[place] = maps[value].where
        elif kind[0] == "*":
            where[place] = ctypes.addressof(addresses) + 8 * value
        else:
            _TYPES[kind].from_buffer(numbers, 8 * place).value = value
    parameters: Any = (ctypes.c_void_p * len(where))(*where)
    parameters.kept = numbers, addresses, maps, kernel  # which unloads itself when nobody keeps it, from Triton 3.8 on
    return parameters


def _arguments(kernel: Loaded) -> list[tuple[str, Any]]:
    """Type and value of all that the kernel takes; the value of a tensor or a map is the place of its address."""
    given = {**kernel.values, **kernel.places}
    found: list[tuple[str, Any]] = []
    for name, kind in kernel.compiled.src.signature.items():
        tiled = kernel.tiled.get(name)
        found += _flat(kind, given.get(name)) if tiled is None else _described(given[name], tiled)
    return found


def _described(place: int, tiled: Tiled) -> list[tuple[str, Any]]:
    return [(_MAP, place), *[("i32", n) for n in tiled.shape], *[("i64", stride) for stride in tiled.strides]]


def _flat(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Tuples as their elements, constants left out."""
    if isinstance(kind, tuple):
        for inner, element in zip(kind, value, strict=True):
            yield from _flat(inner, element)
    elif kind != "constexpr":
        yield kind, value
