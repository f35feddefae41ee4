"""Tensors as the TMA unit of a Hopper GPU reads and writes them: 128 bytes that a kernel takes by value.

The driver lays them out once, as Triton has it do so (``make_tensordesc_arg`` and ``fillTMADescriptor`` in
triton/backends/nvidia/driver.py and .c). From launch to launch only the address is another one.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import Any, NamedTuple

from attnpatch.kernels.common import libcuda

_BYTES, _ALIGNMENT = 128, 64  # of a CUtensorMap
_L2_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


class Tiled(NamedTuple):
    """A tensor that a kernel takes as a descriptor: where it lies, shape, strides in elements; zeros around it."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TensorMap:
    """What the kernel is given.

    Args:
        tiled: the tensor.
        form: what the kernel was compiled for, of ``tensordesc_meta``: box, swizzle, type.
    """

    def __init__(self, tiled: Tiled, form: dict[str, Any]) -> None:
        self._memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
        self.where = -(-ctypes.addressof(self._memory) // _ALIGNMENT) * _ALIGNMENT
        self.usable = _encode(self.where, tiled, form) == 0
        self.move = partial(_replace_address(), self.where)
        """Of an address: it is what is read from now on; returns 0, unless the driver refuses."""


def _encode(where: int, tiled: Tiled, form: dict[str, Any]) -> int:
    """``cuTensorMapEncodeTiled``, which counts dimensions from the innermost on and strides in bytes."""
    rank = len(tiled.shape)
    strides = [form["elem_size"] * stride for stride in tiled.strides[-2::-1]]
    interleave = padding = 0
    return libcuda.function("cuTensorMapEncodeTiled")(
        *(ctypes.c_void_p(where), _host_types()[form["elem_type"]], rank, ctypes.c_void_p(tiled.address)),
        *((ctypes.c_uint64 * rank)(*tiled.shape[::-1]), (ctypes.c_uint64 * (rank - 1))(*strides)),
        *((ctypes.c_uint32 * rank)(*form["block_size"][::-1]), (ctypes.c_uint32 * rank)(*[1] * rank)),
        *(interleave, form["swizzle"], _L2_128B, padding),
    )


def _host_types() -> dict[int, int]:
    """Element types as the driver numbers them."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return TMA_DTYPE_DEVICE_TO_HOST


@cache
def _replace_address() -> Any:
    replace = libcuda.function("cuTensorMapReplaceAddress")
    replace.argtypes = ctypes.c_void_p, ctypes.c_void_p
    return replace
