"""K and V unpacked of codes of 4 bits, TBQ4's or integers: the codes and their norms or scales instead of the vectors.

before   k = (cat([table[unpack(codes)] * norm, ..]) @ rotation).to(dtype)      attnpatch.tbq4.decode, or by hand
after    codes and norms; q and the output turned where the channels lie in another order or under another rotation

before   k = ((unpack(codes).unflatten(-1, (groups, -1)) - zero) * scale).flatten(-2)
after    codes, scales and shifts; -zero * scale is worked out, with a number per group and no vector

Every orthogonal matrix behind the levels will do, for it can go to the other side of a product: with k = decode(codes)
@ turn, q k^T is (q @ turn^T) decode(codes)^T; and with v = decode(codes) @ turn, p v is (p decode(codes)) @ turn.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from attnpatch.axes import Axes
from attnpatch.errors import Refused
from attnpatch.graph import shape, value
from attnpatch.rewrites.channels import Basis, NotIntegers, mixture_of
from attnpatch.rewrites.constants import Constants
from attnpatch.rewrites.nibbles import is_unpacked
from attnpatch.rewrites.operands import Reading, lineage, read
from attnpatch.rewrites.unpacking import Leaf, Unpacking
from attnpatch.rule import Operand, Scaling, Turn
from attnpatch.tbq4 import blocks_of, rotation

_CLOSE = 1e-6
"""How far a matrix of float32 numbers, or a factor, may be from one that it stands for."""

_ORTHOGONAL = 0.02
"""How far a matrix may be from an orthogonal one before rounding q under it costs bits: roundings to bfloat16 pass."""


class Packed(NamedTuple):
    """K or V as codes.

    Args:
        codes: its last dimension is bytes.
        norms: the norms, whose last dimension is blocks; or of integers the scales, whose last dimension is groups, and
            the zero points or shifts.
        turn: from what the codes stand for to what is read.
        reads: codes and norms, each with the node that reads it.
        steps: the nodes that unpack them.
        scaling: of integers, what they stand for.
    """

    codes: Operand
    norms: tuple[Operand, ...]
    turn: Turn
    reads: dict[Node, Node]
    steps: list[Node]
    scaling: Scaling | None = None

    @property
    def blocks(self) -> list[tuple[str, ...]]:
        """The axis of each of the norms, which norms of one block may lack."""
        rows = len(self.codes.dims) - 1
        return [x.dims[rows] if len(x.dims) > rows else () for x in self.norms]

    def read(self, source: Node) -> tuple[Node, Node]:
        """``source``, which codes or norms are made of, and the node that reads its memory in the original."""
        leaf = next(leaf for leaf in self.reads if leaf is source or source in lineage(leaf))
        return read(source, leaf, self.reads[leaf])


def read_packed(
    x: Operand, feature: tuple[str, ...], axes: Axes, reading: Reading, constants: Constants
) -> Packed | None:
    """What ``x`` is unpacked of; None when it is not made of nibbles.

    It is read as integers where it is not made of TBQ4 codes. Where it is neither, the refusal is that of the integers
    if what codes stand for is evenly spaced.

    Args:
        x: K or V.
        feature: the axes of its channels.
        axes: of the attention.
        reading: when K and V are read, and what is written.
        constants: of the graph.

    Raises:
        Refused: it is not unpacked of such codes, or not exactly of them.
    """
    if x.steps or not is_unpacked(x.node):
        return None
    dims = axes.resolve(x.dims)
    rows = dims[: len(dims) - sum(bool(set(dim) & set(feature)) for dim in dims)]
    own = [axis for dim in dims[len(rows) :] for axis in dim]
    if sorted(own) != sorted(feature):
        raise Refused(f"the channels of {x.node.name} are not its last dimension")
    if value(x.node).dtype == torch.float64:
        raise Refused("codes are worked out in float32, and this is float64")
    head_dim = axes.size(feature)
    if not isinstance(head_dim, int):
        raise Refused("head_dim is known only at run time")

    def unpacked(basis: Basis) -> Packed:
        unpacking = Unpacking(axes, reading, constants, basis)
        weights = mixture_of(unpacking.read(x.node, rows), basis).weights
        weights = _in_order(weights, dims[len(rows) :], feature, axes)
        unpacking.check_writes()
        if unpacking.codes is None or not unpacking.norms:
            raise Refused(f"no {'codes' if unpacking.codes is None else 'norms'} are read")
        return (_packed_integers if basis.integers else _packed)(unpacking, weights, axes)

    try:
        return unpacked(_tbq4(head_dim))
    except Refused as refusal:
        try:
            return unpacked(Basis(head_dim, min(head_dim, MOST_GROUPS), integers=True))
        except NotIntegers:
            raise refusal from None


def _tbq4(head_dim: int) -> Basis:
    try:
        return Basis(head_dim, len(blocks_of(head_dim)))
    except ValueError as error:
        raise Refused(str(error)) from None


def _in_order(weights: Tensor, dims: tuple[tuple[str, ...], ...], feature: tuple[str, ...], axes: Axes) -> Tensor:
    """Weights of channels ``[head_dim, ..]`` that lie in dims of their own order."""
    own = [axis for dim in dims for axis in dim]
    weights = weights.reshape(*(axes.sizes[axis] for axis in own), *weights.shape[-2:])
    order = [own.index(axis) for axis in feature]
    return weights.permute(*order, -2, -1).flatten(0, len(own) - 1)


def _packed(unpacking: Unpacking, weights: Tensor, axes: Axes) -> Packed:
    return _made_of(unpacking, unpacking.norms, turn_of(_of_own_norms(weights)), axes)


def _made_of(unpacking: Unpacking, norms: tuple[Leaf, ...], turn: Turn, axes: Axes) -> Packed:
    codes = unpacking.codes
    assert codes is not None
    reads = {x.node: unpacking.reader_of(x) for x in (codes, *norms)}
    operands = tuple(_operand(x, axes) for x in norms)
    return Packed(_operand(codes, axes), operands, turn, reads, list(unpacking.steps))


def _operand(leaf: Leaf, axes: Axes) -> Operand:
    """A leaf with its last dimension named, if it has one more than its rows."""
    own = shape(leaf.node)[len(leaf.rows) :]
    return Operand(leaf.node, (*leaf.rows, *((axes.new(size),) for size in own)))


def _of_own_norms(weights: Tensor) -> Tensor:
    """The matrix from levels times their block's norm to channels, ``[levels, channels]``, of weights of channels.

    Raises:
        Refused: a level comes without its norm, or with that of another block, or something else is added.
    """
    head_dim = len(weights)
    tiny = _CLOSE * weights.abs().max()
    blocks = torch.cat([torch.full((n,), i) for i, n in enumerate(blocks_of(head_dim))])
    if (weights[:, 0, 0].abs() > tiny).any() or (weights[:, 1:, 0].abs() > tiny).any():
        raise Refused("something is added to the levels: a zero point")
    if (weights[:, 0, 1:].abs() > tiny).any():
        raise Refused("levels are read without a norm")
    by_level = weights[:, 1:, 1:].permute(2, 1, 0)  # [levels, norms, channels]
    others = by_level.abs().amax(dim=2) > tiny
    others[torch.arange(head_dim), blocks] = False
    if others.any():
        level, norm = others.nonzero()[0].tolist()
        raise Refused(
            f"nibble {level} is multiplied with norm {norm}; blocks of {', '.join(map(str, blocks_of(head_dim)))} "
            f"channels give it norm {blocks[level]}"
        )
    return by_level[torch.arange(head_dim), blocks]


def turn_of(matrix: Tensor) -> Turn:
    """What is left of a matrix from levels to channels behind TBQ4's own rotation.

    Raises:
        Refused: it is not orthogonal.
    """
    head_dim = len(matrix)
    own = rotation(head_dim, torch.device("cpu"), torch.float32).double()
    turn = own.T @ matrix
    factor = float(turn.square().sum() / head_dim) ** 0.5
    if not 0 < factor < math.inf:
        raise Refused(f"levels are multiplied with {factor}")
    power = 2.0 ** round(math.log2(factor))
    turn, factor = turn / factor, power if abs(factor / power - 1) < _CLOSE else factor
    one = torch.eye(head_dim, dtype=torch.float64)
    if not ((turn @ turn.T - one).abs() < _ORTHOGONAL).all():
        raise Refused("the matrix behind the levels is not orthogonal: q cannot be turned instead")
    order = turn.argmax(dim=0)
    if (turn - one[:, order]).abs().max() > _CLOSE:
        return Turn(factor, matrix=turn)
    return Turn(factor) if torch.equal(order, torch.arange(head_dim)) else Turn(factor, order=order)


MOST_GROUPS = 8
"""Groups of channels of one scale that are looked for: no kernel has tiles for more."""


def _packed_integers(unpacking: Unpacking, weights: Tensor, axes: Axes) -> Packed:
    """Of the weights of channels ``[head_dim, *basis.size]``."""
    n, tiny = unpacking.basis.num_norms, _CLOSE * weights.abs().max()
    by_norm = weights[:, 1 : 1 + 2 * n].unflatten(1, (2, n))
    multiplies = (by_norm[..., 1:].abs() > tiny).any(-1).any(-1).any(0)  # of both tensors of norms
    if (weights[:, 0, 1:].abs() > tiny).any() or (weights[:, 1 + 2 * n :, 1:].abs() > tiny).any() or multiplies.all():
        raise Refused("integers are multiplied with other numbers than one scale")
    if weights[:, 0, 0].any() or not multiplies.any():
        raise Refused("a constant is added to integers" if multiplies.any() else "no scale multiplies the integers")
    first = int(multiplies[1])
    norms = unpacking.norms if first == 0 else unpacking.norms[::-1]
    order, step, group = _one_each(by_norm[:, first, :, 1:], tiny)
    if not torch.equal(order.sort().values, torch.arange(len(order))):
        raise Refused("channels share an integer")
    sizes = [math.prod(shape(x.node)[len(x.rows) :]) for x in norms]
    if len(set(sizes)) > 1:
        raise Refused(f"{norms[0].node.name} has {sizes[0]} groups of channels and {norms[1].node.name} {sizes[1]}")
    if not torch.equal(group, order // (len(order) // sizes[0])):
        raise Refused(f"{sizes[0]} groups of scales are no runs of channels in the order of their nibbles")
    added = [by_norm[:, first, :, 0], by_norm[:, 1 - first, :, 0], weights[:, 1 + 2 * n :, 0]]
    scaling = Scaling(step, *(_same_of_own(x, group, tiny) for x in added))
    turn = Turn() if torch.equal(order, torch.arange(len(order))) else Turn(order=order)
    return _made_of(unpacking, norms, turn, axes)._replace(scaling=scaling)


def _one_each(by_scale: Tensor, tiny: Tensor) -> tuple[Tensor, float, Tensor]:
    """Which integer each channel is, its factor and its scale, of weights ``[channels, scales, integers]``."""
    found = by_scale.abs() > tiny
    if not (found.sum((1, 2)) == 1).all():
        raise Refused("a channel is a sum of several integers: a matrix is behind them")
    step = by_scale.sum((1, 2))
    if (step - step[0]).abs().max() > tiny:
        raise Refused("integers are multiplied with a constant that differs from channel to channel")
    return found.any(1).int().argmax(1), float(step[0]), found.any(2).int().argmax(1)


def _same_of_own(added: Tensor, group: Tensor, tiny: Tensor) -> float:
    """The factor on what is added, ``[channels, groups]``: the same for all channels, of their own group's number."""
    own = added[torch.arange(len(group)), group]
    rest = added.clone()
    rest[torch.arange(len(group)), group] = 0.0
    if (rest.abs() > tiny).any() or ((own - own[0]).abs() > tiny).any():
        raise Refused("zero points are of other groups of channels than scales")
    return float(own[0])
