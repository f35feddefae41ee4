"""Ways to keep K and V, and the bytes that a decode step moves to attend on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class KVFormat:
    """A way to keep K and V.

    Args:
        name: for tables and pictures.
        kept: bytes in the cache of a vector of K or V, ``[head_dim]``, from head_dim.
        moved: bytes that attending once on that vector reads and writes.
    """

    name: str
    kept: Callable[[int], int]
    moved: Callable[[int], int]


def _sixteen(head_dim: int) -> int:
    """float16 or bfloat16."""
    return 2 * head_dim


def _eight(head_dim: int) -> int:
    """fp8 or int8, and a float32 scale per token and head, as ``attnpatch::attention`` takes them."""
    return head_dim + 4


def _tbq4(head_dim: int) -> int:
    """Two codes a byte, and a float16 norm per block of ``attnpatch.tbq4.blocks_of``; ValueError as it raises."""
    from attnpatch.tbq4 import blocks_of

    return head_dim // 2 + 2 * len(blocks_of(head_dim))


def _dequantised(head_dim: int) -> int:
    """Codes read, 16 bit written, 16 bit read by an attention that knows no codes."""
    return _tbq4(head_dim) + 2 * _sixteen(head_dim)


SIXTEEN_BIT = KVFormat("16 bit", _sixteen, _sixteen)
EIGHT_BIT = KVFormat("fp8 / int8", _eight, _eight)
TBQ4 = KVFormat("TBQ4", _tbq4, _tbq4)
SEPARATE_DEQUANT = KVFormat("TBQ4 + dequant", _tbq4, _dequantised)


def formats_for(head_dim: int) -> tuple[KVFormat, ...]:
    """The formats that hold vectors of head_dim channels: those of TBQ4 need a multiple of 8."""
    formats = (SIXTEEN_BIT, EIGHT_BIT)
    return formats if head_dim % 8 else (*formats, TBQ4, SEPARATE_DEQUANT)
