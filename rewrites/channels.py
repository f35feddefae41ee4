"""What the channels of a row are made of, whatever the rows: functions of a byte of codes, and sums of such.

A row of codes is head_dim // 2 bytes b and some norms d. Each channel that is unpacked of it is, in turn,

    Bytes     a function of one byte, known for all 256 of them: b & 15, table[b >> 4]
    Mixture   a sum over i and j of  weights[i, j] * (1, d_0, d_1, ..)[i] * (1, level_0, level_1, ..)[j]

where level_j is what nibble j is read as: of byte j // 2 the low one for an even j. Of TBQ4 that is
STEP * LEVELS[nibble], and d is a norm per block. Of integers it is the nibble, and d is of groups: scales, zero points,
and their products.
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


class NotIntegers(Refused):
    """Codes stand for values that are not evenly spaced."""


class Basis(NamedTuple):
    """What channels are sums of.

    Args:
        head_dim: channels of a vector, so levels.
        num_norms: that one tensor of a row may have.
        integers: whether levels are the integers 0 to 15; then there are two tensors of norms, and their products.
    """

    head_dim: int
    num_norms: int
    integers: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """Of the weights of a channel."""
        return 1 + self.num_norms * (3 if self.integers else 1), 1 + self.head_dim


class Mixture(NamedTuple):
    """Channels that are sums of norms times levels, ``[*features, *basis.size]``, float64."""

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


def mixture_of(x: Channels | Tensor, basis: Basis) -> Mixture:
    """Anything as a mixture: constants, and nibbles that are looked up in the levels times a factor."""
    if isinstance(x, Mixture):
        return x
    if isinstance(x, Tensor):
        weights = torch.zeros(*x.shape, *basis.size, dtype=torch.float64)
        weights[..., 0, 0] = x.double()
        return Mixture(weights)
    place, table = x.place.flatten(), x.table.reshape(-1, 256).double()
    weights = torch.zeros(len(place), *basis.size, dtype=torch.float64)
    nibble, values = _nibbles(place, table)
    added, factor = _of_integers(values) if basis.integers else (0.0, _of_levels(values))
    weights[torch.arange(len(place)), 0, 1 + nibble] = factor
    weights[:, 0, 0] = added
    return Mixture(weights.reshape(*x.place.shape, *basis.size))


def _nibbles(place: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Of functions of a byte ``[channels, 256]``: which nibble each reads, and its 16 values."""
    by_nibble = table.reshape(-1, 16, 16)
    is_low = (by_nibble == by_nibble[:, :1]).all(-1).all(-1)
    is_high = (by_nibble == by_nibble[:, :, :1]).all(-1).all(-1)
    if not (is_low ^ is_high).all():
        raise Refused("a channel is no function of one of the two nibbles of a byte")
    return 2 * place + is_high, by_nibble[:, 0].where(is_low[:, None], by_nibble[:, :, 0])


def _of_levels(values: Tensor) -> Tensor:
    """The factor on the levels of TBQ4 that values ``[channels, 16]`` are."""
    factor = values[:, -1] / _LEVELS[-1]
    if ((values - factor[:, None] * _LEVELS).abs() > EXACT * values[:, -1:].abs()).any():
        raise Refused("codes stand for other values than the levels of TBQ4 times one factor")
    return factor


def _of_integers(values: Tensor) -> tuple[Tensor, Tensor]:
    """What is added, and the step, of evenly spaced values ``[channels, 16]``."""
    first, step = values[:, 0], (values[:, -1] - values[:, 0]) / 15
    even = first[:, None] + step[:, None] * torch.arange(16)
    if ((values - even).abs() > EXACT * values.abs().amax(dim=1, keepdim=True)).any() or (step == 0).any():
        raise NotIntegers("codes stand for values that are not evenly spaced")
    return first, step


def added(a: Mixture, b: Mixture, sign: int) -> Mixture:
    """Their sum or difference."""
    a, b = _aligned(a, b)
    return Mixture(a.weights + sign * b.weights)


def multiplied(a: Mixture, b: Mixture, basis: Basis) -> Mixture:
    """Their product; one of both has no levels, and one no norms."""
    a, b = _aligned(a, b)
    factor, other = (a, b) if not a.weights[..., 1:].any() else (b, a)
    if factor.weights[..., 1:].any():
        raise Refused("levels are multiplied with each other")
    plain, norms = factor.weights[..., :1, :1], factor.weights[..., 1:, :1]
    if not norms.any():
        return Mixture(plain * other.weights)
    product = plain * other.weights
    product[..., 1:, :] += norms * other.weights[..., :1, :]
    if other.weights[..., 1:, :].any():
        product[..., 1 + 2 * basis.num_norms :, 0] += _of_two_tensors(norms[..., 0], other.weights[..., 1:, :], basis)
    return Mixture(product)


def _of_two_tensors(norms: Tensor, others: Tensor, basis: Basis) -> Tensor:
    """Products of scales and zero points of the same group, by group."""
    n = basis.num_norms
    if not basis.integers or others[..., 1:].any() or norms[..., 2 * n :].any() or others[..., 2 * n :, :].any():
        raise Refused("norms are multiplied with each other")
    a, b = norms[..., : 2 * n].unflatten(-1, (2, n)), others[..., : 2 * n, 0].unflatten(-1, (2, n))
    if (a * b).any() or _crosses(a[..., 0, :], b[..., 1, :]) or _crosses(a[..., 1, :], b[..., 0, :]):
        raise Refused("scales are multiplied with each other, or with zero points of another group")
    return a[..., 0, :] * b[..., 1, :] + a[..., 1, :] * b[..., 0, :]


def _crosses(a: Tensor, b: Tensor) -> bool:
    """Whether anything is multiplied with another group's."""
    return bool((a[..., :, None] * b[..., None, :] * (1 - torch.eye(a.shape[-1], dtype=a.dtype))).any())


def turned(x: Mixture, matrix: Tensor) -> Mixture:
    """``x @ matrix``, over the last dimension of the channels."""
    return Mixture(torch.einsum("...cij,cd->...dij", x.weights, matrix.double()))


def _aligned(a: Mixture, b: Mixture) -> tuple[Mixture, Mixture]:
    """Both with as many dimensions of channels."""
    rank = max(a.weights.dim(), b.weights.dim())
    a, b = (Mixture(x.weights.reshape(*[1] * (rank - x.weights.dim()), *x.weights.shape)) for x in (a, b))
    return a, b
