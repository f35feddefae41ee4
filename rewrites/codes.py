"""K and V unpacked of TBQ4 codes: the codes and their norms instead of the vectors.

before   k = (cat([table[unpack(codes)] * norm, ..]) @ rotation).to(dtype)      attnpatch.tbq4.decode, or by hand
after    codes and norms; q and the output turned where the channels lie in another order or under another rotation

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
from attnpatch.rewrites.channels import mixture_of
from attnpatch.rewrites.constants import Constants
from attnpatch.rewrites.nibbles import is_unpacked
from attnpatch.rewrites.operands import Reading, lineage, read
from attnpatch.rewrites.unpacking import Leaf, Unpacking
from attnpatch.rule import Operand, Turn
from attnpatch.tbq4 import blocks_of, rotation

_CLOSE = 1e-6
"""How far a matrix of float32 numbers, or a factor, may be from one that it stands for."""

_ORTHOGONAL = 0.02
"""How far a matrix may be from an orthogonal one before rounding q under it costs bits: roundings to bfloat16 pass."""


class Packed(NamedTuple):
    """K or V as codes.

    Args:
        codes: its last dimension is bytes.
        norms: its last dimension is blocks.
        turn: from what the codes stand for to what is read.
        reads: codes and norms, each with the node that reads it.
        steps: the nodes that unpack them.
    """

    codes: Operand
    norms: Operand
    turn: Turn
    reads: dict[Node, Node]
    steps: list[Node]

    @property
    def blocks(self) -> tuple[str, ...]:
        """The axis of the norms, which norms of one block may lack."""
        return self.norms.dims[-1] if len(self.norms.dims) == len(self.codes.dims) else ()

    def read(self, source: Node) -> tuple[Node, Node]:
        """``source``, which codes or norms are made of, and the node that reads its memory in the original."""
        leaf = next(leaf for leaf in self.reads if leaf is source or source in lineage(leaf))
        return read(source, leaf, self.reads[leaf])


def read_packed(
    x: Operand, feature: tuple[str, ...], axes: Axes, reading: Reading, constants: Constants
) -> Packed | None:
    """What ``x`` is unpacked of; None when it is not made of nibbles.

    Args:
        x: K or V.
        feature: the axes of its channels.
        axes: of the attention.
        reading: when K and V are read, and what is written.
        constants: of the graph.

    Raises:
        Refused: it is not unpacked of TBQ4 codes, or not exactly of them.
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
    unpacking = _unpacking(axes, feature, reading, constants)
    weights = mixture_of(unpacking.read(x.node, rows), *unpacking.sizes).weights
    weights = _in_order(weights, dims[len(rows) :], feature, axes)
    unpacking.check_writes()
    return _packed(unpacking, weights, axes)


def _unpacking(axes: Axes, feature: tuple[str, ...], reading: Reading, constants: Constants) -> Unpacking:
    head_dim = axes.size(feature)
    if not isinstance(head_dim, int):
        raise Refused("head_dim is known only at run time")
    try:
        return Unpacking(axes, reading, constants, len(blocks_of(head_dim)), head_dim)
    except ValueError as error:
        raise Refused(str(error)) from None


def _in_order(weights: Tensor, dims: tuple[tuple[str, ...], ...], feature: tuple[str, ...], axes: Axes) -> Tensor:
    """Weights of channels ``[head_dim, ..]`` that lie in dims of their own order."""
    own = [axis for dim in dims for axis in dim]
    weights = weights.reshape(*(axes.sizes[axis] for axis in own), *weights.shape[-2:])
    order = [own.index(axis) for axis in feature]
    return weights.permute(*order, -2, -1).flatten(0, len(own) - 1)


def _packed(unpacking: Unpacking, weights: Tensor, axes: Axes) -> Packed:
    codes, norms = unpacking.codes, unpacking.norms
    if codes is None or norms is None:
        raise Refused(f"no {'codes' if codes is None else 'norms'} are read")
    turn = turn_of(_of_own_norms(weights))
    reads = {x.node: unpacking.reader_of(x) for x in (codes, norms)}
    return Packed(_operand(codes, axes), _operand(norms, axes), turn, reads, list(unpacking.steps))


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
