"""What the channels of a row are made of, whatever the rows: functions of a byte of codes, and sums of such.

A row of codes is head_dim // 2 bytes b and num_blocks norms d. Each channel that is unpacked of it is, in turn,

    Bytes     a function of one byte, known for all 256 of them: b & 15, table[b >> 4]
    Mixture   a sum over i and j of  weights[i, j] * (1, d_0, d_1, ..)[i] * (1, level_0, level_1, ..)[j]

where level_j is what TBQ4 reads nibble j as, STEP * LEVELS[nibble]: of byte j // 2 the low one for an even j.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnpatch.errors import Refused
from attnpatch.tbq4 import LEVELS, STEP

EXACT = 2.0**-21
"""What roundings to float32 may make of equal numbers, relative."""

_LEVELS = torch.tensor(LEVELS, dtype=torch.float64) * STEP


class Bytes(NamedTuple):
    """Channels that are functions of one byte each.

    Args:
        place: which byte, int64 ``[*features]``.
        table: of what every byte gives, ``[*features, 256]``, in the dtype of the node.
    """

    place: Tensor
    table: Tensor


class Mixture(NamedTuple):
    """Channels that are sums of norms times levels, ``[*features, 1 + num_blocks, 1 + head_dim]``, float64."""

    weights: Tensor


Channels = Bytes | Mixture


def numbers(x: Channels) -> Tensor:
    """The numbers of channels in their own shape."""
    own = x.place.shape if isinstance(x, Bytes) else x.weights.shape[:-2]
    return torch.arange(own.numel()).reshape(own)


def picked(parts: Sequence[Channels], index: Tensor) -> Channels:
    """Channels by their number, counted through ``parts``, which are of one kind, in the shape of ``index``."""
    packed = [x for x in parts if isinstance(x, Bytes)]
    mixed = [x for x in parts if isinstance(x, Mixture)]
    if packed:
        place = torch.cat([x.place.flatten() for x in packed])
        return Bytes(place[index], torch.cat([x.table.reshape(-1, 256) for x in packed])[index])
    return Mixture(torch.cat([x.weights.reshape(-1, *x.weights.shape[-2:]) for x in mixed])[index])


def looked_up(table: Tensor, x: Bytes) -> Bytes:
    """``table[x]``, whose further dimensions become channels."""
    index = x.table.long()
    if index.min() < 0 or index.max() >= len(table):
        raise Refused(f"codes up to {int(index.max())} look up a table of {len(table)}")
    rest = table.shape[1:]
    place = x.place.reshape(*x.place.shape, *[1] * len(rest)).expand(*x.place.shape, *rest)
    return Bytes(place, table[index].movedim(x.place.dim(), -1))


def mixture_of(x: Channels | Tensor, num_blocks: int, head_dim: int) -> Mixture:
    """Anything as a mixture: constants, and nibbles that are looked up in the levels times a factor."""
    if isinstance(x, Mixture):
        return x
    if isinstance(x, Tensor):
        weights = torch.zeros(*x.shape, 1 + num_blocks, 1 + head_dim, dtype=torch.float64)
        weights[..., 0, 0] = x.double()
        return Mixture(weights)
    place, table = x.place.flatten(), x.table.reshape(-1, 256).double()
    weights = torch.zeros(len(place), 1 + num_blocks, 1 + head_dim, dtype=torch.float64)
    nibble, factor = _nibbles(place, table)
    weights[torch.arange(len(place)), 0, 1 + nibble] = factor
    return Mixture(weights.reshape(*x.place.shape, 1 + num_blocks, 1 + head_dim))


def _nibbles(place: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Of functions of a byte ``[channels, 256]``: which nibble each reads, and the factor on its level."""
    by_nibble = table.reshape(-1, 16, 16)
    is_low = (by_nibble == by_nibble[:, :1]).all(-1).all(-1)
    is_high = (by_nibble == by_nibble[:, :, :1]).all(-1).all(-1)
    if not (is_low ^ is_high).all():
        raise Refused("a channel is no function of one of the two nibbles of a byte")
    values = by_nibble[:, 0].where(is_low[:, None], by_nibble[:, :, 0])
    factor = values[:, -1] / _LEVELS[-1]
    if ((values - factor[:, None] * _LEVELS).abs() > EXACT * values[:, -1:].abs()).any():
        raise Refused(_said(values[0]))
    return 2 * place + is_high, factor


def _said(values: Tensor) -> str:
    """What is wrong with 16 values."""
    steps = values.diff()
    if torch.allclose(steps, steps[:1], rtol=1e-5, atol=0.0):
        return f"codes stand for evenly spaced values from {values[0]:.4g}: integers with a zero point, not TBQ4"
    return "codes stand for other values than the levels of TBQ4 times one factor"


def added(a: Mixture, b: Mixture, sign: int) -> Mixture:
    """Their sum or difference."""
    a, b = _aligned(a, b)
    return Mixture(a.weights + sign * b.weights)


def multiplied(a: Mixture, b: Mixture) -> Mixture:
    """Their product; one of both has no levels, and one no norms."""
    a, b = _aligned(a, b)
    factor, other = (a, b) if not a.weights[..., 1:].any() else (b, a)
    if factor.weights[..., 1:].any():
        raise Refused("levels are multiplied with each other")
    plain, norms = factor.weights[..., :1, :1], factor.weights[..., 1:, :1]
    if not norms.any():
        return Mixture(plain * other.weights)
    if other.weights[..., 1:, :].any():
        raise Refused("norms are multiplied with each other")
    return Mixture(torch.cat((plain * other.weights[..., :1, :], norms * other.weights[..., :1, :]), dim=-2))


def turned(x: Mixture, matrix: Tensor) -> Mixture:
    """``x @ matrix``, over the last dimension of the channels."""
    return Mixture(torch.einsum("...cij,cd->...dij", x.weights, matrix.double()))


def _aligned(a: Mixture, b: Mixture) -> tuple[Mixture, Mixture]:
    """Both with as many dimensions of channels."""
    rank = max(a.weights.dim(), b.weights.dim())
    a, b = (Mixture(x.weights.reshape(*[1] * (rank - x.weights.dim()), *x.weights.shape)) for x in (a, b))
    return a, b
