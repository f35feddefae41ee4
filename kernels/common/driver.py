"""Launch a kernel that Triton has compiled and loaded by one call of the CUDA driver.

Triton's own launcher parses all arguments of the kernel at every launch. Here all but the addresses of tensors are
laid out once, just as it lays them out (``_launch`` in triton/backends/nvidia/driver.py or driver.c): each argument
that is no constant, tuples flattened, in order and as wide as the kernel's signature says, then two pointers to scratch
memory. ``cuLaunchKernelEx`` copies them before it returns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from threading import Lock
from typing import Any

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


def driver_launch(
    compiled: Any, programs: int, names: Sequence[str], values: dict[str, Any], stream_of: Callable[[int], int]
) -> Callable[[int, Sequence[int]], int] | None:
    """What launches ``compiled`` on a device, given the addresses of its tensors.

    Args:
        compiled: what a launch of Triton's returns; it is loaded.
        programs: size of the grid.
        names: the kernel's arguments that are tensors.
        values: the others.
        stream_of: the current stream of a device.

    Returns:
        A function of the device, which is the current one, and the addresses in the order of ``names``, whose result
        is the driver's: 0 when it has launched. None for a kernel that needs more than is known here.
    """
    arguments = _arguments(compiled.src.signature, names, values)
    if not _is_plain(compiled.metadata) or any(kind not in _TYPES for kind, _ in arguments if kind[0] != "*"):
        return None
    addresses: Any = (ctypes.c_uint64 * len(names))()
    parameters = _parameters(arguments, names, addresses)
    parameters.kept += (compiled,)  # which unloads itself when nobody keeps it, from Triton 3.8 on
    config = _config(compiled.metadata, programs)
    function, by_reference = ctypes.c_void_p(compiled.function), ctypes.byref(config)
    cu_launch, lock = _cu_launch(), Lock()

    def launch(device: int, given: Sequence[int]) -> int:
        with lock:  # another thread may be launching, too
            addresses[:] = given
            config.stream = stream_of(device)
            return cu_launch(by_reference, function, parameters, None)

    return launch


@cache
def _cu_launch() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx


def _is_plain(metadata: Any) -> bool:
    """Whether the kernel needs no scratch memory, no cluster, no cooperative grid."""
    scratch = metadata.global_scratch_size or metadata.profile_scratch_size
    special = scratch or metadata.launch_cooperative_grid or metadata.num_ctas != 1
    return not special and metadata.shared <= _MAX_SHARED


def _arguments(signature: dict[str, Any], names: Sequence[str], values: dict[str, Any]) -> list[tuple[str, Any]]:
    """Type and value of all that the kernel takes; the value of a tensor is its name."""
    given = {name: name if name in names else values.get(name) for name in signature}
    return [pair for name, kind in signature.items() for pair in _flat(kind, given[name])]


def _flat(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Tuples as their elements, constants left out."""
    if isinstance(kind, tuple):
        for inner, element in zip(kind, value, strict=True):
            yield from _flat(inner, element)
    elif kind != "constexpr":
        yield kind, value


def _parameters(arguments: list[tuple[str, Any]], names: Sequence[str], addresses: Any) -> Any:
    """``void**``: where each argument lies. It keeps what it points to."""
    numbers = (ctypes.c_uint64 * (len(arguments) + _SCRATCH))()
    where = [ctypes.addressof(numbers) + 8 * place for place in range(len(numbers))]
    for place, (kind, value) in enumerate(arguments):
        if kind[0] == "*":
            where[place] = ctypes.addressof(addresses) + 8 * names.index(value)
        else:
            _TYPES[kind].from_buffer(numbers, 8 * place).value = value
    parameters: Any = (ctypes.c_void_p * len(where))(*where)
    parameters.kept = numbers, addresses
    return parameters


def _config(metadata: Any, programs: int) -> _Config:
    attributes = [_OVERLAPS] if metadata.launch_pdl else []
    block = (32 * metadata.num_warps, 1, 1)
    array = (_Attribute * len(attributes))(*attributes)
    return _Config((programs, 1, 1), block, metadata.shared, None, array, len(attributes))
