"""The 66-byte blocks in which forks of llama.cpp keep TBQ4 (``block_tbq4_0``), for exchange and as a second witness.

    bytes 0-1    d, float16, little-endian: |x| / |CENTROIDS[code]|
    bytes 2-65   codes: channel 2b of the rotated block in the low 4 bits of byte b, channel 2b + 1 in the high ones

Rotation, blocks of 128 and codes are those of the live format; its levels are whole numbers, these are not. So a cache
is converted code by code with the norm made anew: lengths are kept, and channels differ by the 0.3 % between the two
tables. Converting there and back changes no code, and a norm by its last bit at most.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from attnpatch.tbq4.codec import (
    LARGEST_BLOCK,
    check_codes,
    check_vectors,
    levels_length,
    norms_of,
    pack,
    quantise,
    rotated_units,
    table,
    unpack,
    unrotate,
)

NUM_BYTES = 66

_UPPER = (0.011353, 0.034311, 0.058069, 0.083317, 0.111065, 0.143047, 0.182907, 0.241556)
CENTROIDS = (*(-c for c in reversed(_UPPER)), *_UPPER)
"""What codes 0 to 15 stand for, in a block of length 1."""

_UPPER_BOUNDARIES = (0.022832, 0.046190, 0.070693, 0.097191, 0.127056, 0.162977, 0.212232)
BOUNDARIES = (*(-b for b in reversed(_UPPER_BOUNDARIES)), 0.0, *_UPPER_BOUNDARIES)
"""What lies at or above the i-th has a code above i."""


def export_blocks(x: Tensor) -> bytes:
    """Vectors in 66-byte blocks, row by row.

    Args:
        x: ``[.., 128 * n]``, float16, bfloat16 or float32, any strides and device.

    Raises:
        ValueError: x has another dtype or width.
    """
    check_vectors(x)
    units, length = rotated_units(_blocks(x))
    codes = quantise(units.float(), BOUNDARIES)
    return _to_bytes(length / _length(codes), codes)


def import_blocks(data: bytes, shape: tuple[int, ...]) -> Tensor:
    """Vectors of 66-byte blocks, float32 on the CPU.

    Args:
        data: what :func:`export_blocks` returned.
        shape: ``[.., 128 * n]``, of the result.

    Raises:
        ValueError: data is no such tensor.
    """
    d, codes = _from_bytes(data, shape)
    return unrotate(table(CENTROIDS, codes.device)[codes.long()] * d.float()[:, None]).reshape(shape)


def from_blocks(data: bytes, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Codes and norms of a cache of 66-byte blocks of vectors of ``shape``; see :func:`attnpatch.tbq4.encode`.

    Raises:
        ValueError: data is no such tensor.
    """
    d, codes = _from_bytes(data, shape)
    norms = norms_of(d.double() * _length(codes), codes)
    return pack(codes).reshape(*shape[:-1], -1), norms.reshape(*shape[:-1], -1)


def to_blocks(codes: Tensor, norms: Tensor) -> bytes:
    """A cache of vectors of 128 * n channels in 66-byte blocks.

    Args:
        codes: uint8 ``[.., 64 * n]``.
        norms: float16 ``[.., n]``.

    Raises:
        ValueError: codes or norms have another dtype or shape.
    """
    check_codes(codes, norms, 2 * codes.shape[-1])
    blocks = _blocks(unpack(codes))
    return _to_bytes(norms.double().flatten() * levels_length(blocks) / _length(blocks), blocks)


def _blocks(x: Tensor) -> Tensor:
    """``[.., 128 * n]`` as ``[blocks, 128]``."""
    _check_width(x.shape)
    return x.reshape(-1, LARGEST_BLOCK)


def _length(codes: Tensor) -> Tensor:
    """Lengths ``[..]`` of blocks of codes ``[.., 128]`` that have d 1, float64."""
    return torch.linalg.vector_norm(table(CENTROIDS, codes.device).double()[codes.long()], dim=-1)


def _to_bytes(d: Tensor, codes: Tensor) -> bytes:
    blocks = torch.cat((d.half()[:, None].view(torch.uint8), pack(codes)), dim=1)
    return blocks.cpu().numpy().tobytes()


def _from_bytes(data: bytes, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Norms d ``[blocks]`` and codes ``[blocks, 128]``."""
    _check_width(shape)
    needed = math.prod(shape) // LARGEST_BLOCK * NUM_BYTES
    if len(data) != needed:
        raise ValueError(
            f"vectors of shape {tuple(shape)} are {needed} bytes, {NUM_BYTES} per {LARGEST_BLOCK} channels; "
            f"got {len(data)}"
        )
    blocks = torch.from_numpy(np.frombuffer(data, np.uint8).reshape(-1, NUM_BYTES).copy())
    return blocks[:, :2].contiguous().view(torch.float16)[:, 0], unpack(blocks[:, 2:])


def _check_width(shape: tuple[int, ...]) -> None:
    if not shape or shape[-1] == 0 or shape[-1] % LARGEST_BLOCK:
        raise ValueError(
            f"66-byte blocks hold {LARGEST_BLOCK} channels each; the last dimension of {tuple(shape)} is no multiple "
            "of that, use attnpatch.tbq4.encode"
        )
