"""The live TBQ4 format: what a cache holds and kernels read.

A vector of head_dim channels is cut into blocks of 128, and what is left over into powers of two (:func:`blocks_of`);
no block reaches into another head. A block x of n channels is kept as

    y = s2 * (H (s1 * x)) / sqrt(n)     rotated: H is Sylvester's Hadamard matrix, s1 and s2 are fixed signs
    code_i = the level next to y_i / |x| * sqrt(n)      (of variance 1), a tie goes to the higher one
    norm = |x| / |LEVELS[code]| / STEP                  in float16
    x is read as y_i = norm * STEP * LEVELS[code_i], rotated back: |x| survives, but for the rounding of norm.

- *Levels* are whole numbers of 7 bits and a sign: a kernel multiplies them exactly, in int8 or in float16. They differ
  from the 16 best levels of a normal distribution by 0.3 %, which the error does not show.
- *STEP* is a power of two, so it costs no rounding. Without it, the norm of a vector of length 1e-4 would be 2e-7,
  where float16 has two bits left. With it, lengths from 6e-5 to 1e4 have a norm with all its bits, in blocks of any
  size; below, bits are lost, and under 2e-8 the block is zero. Norms of usual keys, about 10, also keep a probability
  times a norm a normal float16 in kernels that multiply the two.
- *Zero*: a block of length up to 1e-10 has norm 0 and codes 8.
- *What does not fit*: a block that holds NaN or infinity, or is too long for its norm (above 1e4 in some blocks of 8,
  5.5e4 in usual ones of 128), has norm NaN. It reads back as NaN, as in caches of 8 bits: a wrong vector would go
  unseen.
- *The smallest block* has 8 channels, 6 bits per channel; head dims that are no multiple of 8 are refused.

    codes  uint8    [.., head_dim // 2]   channel 2b of y in the low 4 bits of byte b, channel 2b + 1 in the high ones
    norms  float16  [.., num_blocks]
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

LEVELS = (-104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104)
"""What codes 0 to 15 stand for, in units of norm * STEP."""

STEP = 2.0**-9
"""Unit of the levels: a channel of a rotated block is ``norm * STEP * level``."""

LEVEL_SCALE = 0.00231352 * 128**0.5
"""Level 1 in a rotated block of variance 1."""

BOUNDARIES = tuple((low + high) / 2 * LEVEL_SCALE for low, high in pairwise(LEVELS))
"""What lies at or above the i-th, in a rotated block of variance 1, has a code above i."""

SIGNS = ("59036ae44959f842bb3bc6a4a950f249", "90eeac16dc8f623f7a35a5b76265a5be")
"""s1 and s2: bit i of the little-endian bytes is set where channel i is negated. A block takes the first of them."""

SHORTEST, LONGEST = 1e-10, 1e18
"""Blocks of a length above the one and below the other are rotated; squares of longer ones may pass float32."""

LARGEST_BLOCK = 128
SMALLEST_BLOCK = 8


def blocks_of(head_dim: int) -> tuple[int, ...]:
    """Sizes of the blocks of a vector, in order: 256 is (128, 128), 192 (128, 64), 80 (64, 16), 40 (32, 8).

    Raises:
        ValueError: head_dim is no positive multiple of 8.
    """
    if head_dim <= 0 or head_dim % SMALLEST_BLOCK:
        raise ValueError(
            f"head_dim {head_dim} is not a positive multiple of {SMALLEST_BLOCK}, the smallest block of TBQ4; "
            "keep this K or V dense or in 8 bits"
        )
    rest = head_dim % LARGEST_BLOCK
    powers = (64, 32, 16, 8)
    return (LARGEST_BLOCK,) * (head_dim // LARGEST_BLOCK) + tuple(n for n in powers if rest & n)


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and norms of vectors.

    Worked out in float64: torch may round the operands of a float32 product (TF32).

    Args:
        x: ``[.., head_dim]``, float16, bfloat16 or float32, any strides.

    Returns:
        codes: uint8 ``[.., head_dim // 2]``.
        norms: float16 ``[.., num_blocks]``, one for each of :func:`blocks_of`.

    Raises:
        ValueError: x is of another dtype, or its head_dim cannot be cut into blocks.
    """
    check_vectors(x)
    blocks = [_encode_block(block) for block in x.split(blocks_of(x.shape[-1]), dim=-1)]
    codes, norms = zip(*blocks, strict=True)
    return pack(torch.cat(codes, dim=-1)), torch.stack(norms, dim=-1)


def decode(codes: Tensor, norms: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Vectors of codes and norms, ``[.., head_dim]`` in ``dtype``, worked out in float32.

    Args:
        codes: uint8 ``[.., head_dim // 2]``.
        norms: float16 ``[.., num_blocks]``. NaN makes its block NaN, and any other block of the vector.
        head_dim: channels of a vector.
        dtype: of the result.

    Raises:
        ValueError: codes or norms have another dtype or shape.
    """
    check_codes(codes, norms, head_dim)
    levels = table(_SCALED_LEVELS, codes.device)[unpack(codes).long()]
    pieces = levels.split(blocks_of(head_dim), dim=-1)
    scaled = [piece * norm for piece, norm in zip(pieces, norms.float().split(1, dim=-1), strict=True)]
    return (torch.cat(scaled, dim=-1) @ rotation(head_dim, codes.device, torch.float32)).to(dtype)


def rotate(x: Tensor) -> Tensor:
    """Vectors ``[.., head_dim]`` as the codes see them, in x's dtype; products of two rotated vectors are theirs."""
    return x @ rotation(x.shape[-1], x.device, x.dtype).T


def unrotate(y: Tensor) -> Tensor:
    """The inverse of :func:`rotate`."""
    return y @ rotation(y.shape[-1], y.device, y.dtype)


@torch.compiler.assume_constant_result
def rotation(head_dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The orthogonal ``[head_dim, head_dim]`` R of ``y = R x``, so of rows ``y = x @ R.T`` and ``x = y @ R``.

    A square per block on the diagonal, zeros elsewhere. One tensor for all callers: not to be written.

    Raises:
        ValueError: head_dim is no positive multiple of 8.
    """
    return _rotation(head_dim, device, dtype)


def rotated_units(x: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks ``[.., n]`` of length 1, rotated, and their lengths ``[..]``, both float64.

    Blocks that are zero, too long or not finite are zeros.
    """
    x = x.double()
    length = torch.linalg.vector_norm(x, dim=-1)
    usable = (length > SHORTEST) & (length < LONGEST)
    units = (x / length[..., None]).where(usable[..., None], 0.0)
    return rotate(units), length


def norms_of(length: Tensor, codes: Tensor) -> Tensor:
    """float16 norms ``[..]`` of blocks of float64 ``length``, by their codes ``[.., n]``."""
    norms = (length / levels_length(codes)).half()
    return norms.where(norms.isfinite(), torch.nan)


def levels_length(codes: Tensor) -> Tensor:
    """Lengths ``[..]`` of blocks of codes ``[.., n]`` that have norm 1, float64."""
    return torch.linalg.vector_norm(table(_SCALED_LEVELS, codes.device).double()[codes.long()], dim=-1)


def pack(codes: Tensor) -> Tensor:
    """Codes ``[.., n]`` below 16, two to a byte ``[.., n // 2]``."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Codes ``[.., n]`` of bytes ``[.., n // 2]``."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


@torch.compiler.assume_constant_result
def table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Float32 values on a device, one tensor for all callers."""
    return _table(values, device)


def check_vectors(x: Tensor) -> None:
    """Raise what :func:`encode` raises of a dtype."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"TBQ4 encodes float16, bfloat16 and float32; got {x.dtype}: cast it first")


def check_codes(codes: Tensor, norms: Tensor, head_dim: int) -> None:
    """Raise what :func:`decode` raises."""
    _check("codes", codes, torch.uint8, (*codes.shape[:-1], head_dim // 2), head_dim)
    _check("norms", norms, torch.float16, (*codes.shape[:-1], len(blocks_of(head_dim))), head_dim)


def _check(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], head_dim: int) -> None:
    if x.dtype != dtype or tuple(x.shape) != shape:
        raise ValueError(
            f"{name} of vectors of head_dim {head_dim} must be {dtype} {shape}; got {x.dtype} {tuple(x.shape)}"
        )


_SCALED_LEVELS = tuple(level * STEP for level in LEVELS)


def _encode_block(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[.., n]`` and norms ``[..]`` of blocks."""
    units, length = rotated_units(x)
    codes = quantise((units * x.shape[-1] ** 0.5).float(), BOUNDARIES)
    return codes, norms_of(length, codes)


def quantise(y: Tensor, boundaries: tuple[float, ...]) -> Tensor:
    """How many of ``boundaries`` lie at or below each element, uint8."""
    return torch.bucketize(y, table(boundaries, y.device), right=True, out_int32=True).to(torch.uint8)


@cache
def _rotation(head_dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    squares = [_hadamard(n) * _signs(0, n) * _signs(1, n)[:, None] / n**0.5 for n in blocks_of(head_dim)]
    return _of_fixed_size(torch.block_diag(*squares).to(device=device, dtype=dtype))


@cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return _of_fixed_size(torch.tensor(values, dtype=torch.float32, device=device))


def _of_fixed_size(constant: Tensor) -> Tensor:
    """Dynamo takes the sizes of constants from one function for sizes of one input, and fails to guard them.

    ``torch._dynamo.mark_static`` sets this, but nothing where Dynamo itself makes the constant.
    """
    constant._dynamo_static_indices = set(range(constant.dim()))  # type: ignore[attr-defined]
    constant._has_dynamo_dim_marking = True  # type: ignore[attr-defined]
    return constant


def _hadamard(n: int) -> Tensor:
    """Sylvester's matrix, float64: -1 where the indices share an odd number of bits."""
    square = torch.ones(1, 1, dtype=torch.float64)
    while len(square) < n:
        square = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), square)
    return square


def _signs(which: int, n: int) -> Tensor:
    bits = int.from_bytes(bytes.fromhex(SIGNS[which]), "little")
    return torch.tensor([-1.0 if bits >> i & 1 else 1.0 for i in range(n)], dtype=torch.float64)
