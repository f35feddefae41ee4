"""Edges of the keys that a row sees, as expressions over the row q and tensors of a graph, and their code.

An edge is one integer per (batch, row). :class:`EdgeEmitter` writes the operations that compute it, on tensors of
``[batch or 1, seqlen_q]``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from attnpatch.affine import Affine
from attnpatch.graph import shape, value


@dataclass(frozen=True)
class Floor:
    """``numerator // divisor * divisor``."""

    numerator: Affine
    divisor: int


@dataclass(frozen=True)
class Search:
    """Where the run of ``ids`` that holds position ``row`` begins (right: ends); ``by_runs``: ids may fall."""

    ids: Node
    row: Affine
    right: bool
    by_runs: bool = False


@dataclass(frozen=True)
class Latest:
    """The larger of two edges."""

    left: Any
    right: Any


@dataclass(frozen=True)
class Smallest:
    """The smaller of two edges."""

    left: Any
    right: Any


@dataclass(frozen=True)
class Chosen:
    """The edge where ``condition >= 0``, else ``otherwise``."""

    condition: Affine
    edge: Any
    otherwise: int


Edge = Any
"""Affine, Floor, Search, Latest, Smallest, Chosen, or a tuple of edges that are added."""


def affines(edge: Any) -> Iterator[Affine]:
    """Every affine expression in an edge or an interval."""
    if isinstance(edge, Affine):
        yield edge
    elif isinstance(edge, tuple):
        for part in edge:
            yield from affines(part)
    elif is_dataclass(edge):
        for part in fields(edge):
            yield from affines(getattr(edge, part.name))


def scalar_nodes(edge: Any) -> list[Node]:
    """The scalars that an edge or an interval depends on."""
    return list(dict.fromkeys(atom for x in affines(edge) for atom in x.coefficients if isinstance(atom, Node)))


def tensor_nodes(edge: Any) -> list[Node]:
    """The tensors whose elements an edge or an interval depends on."""
    loaded = [atom.node for x in affines(edge) for atom in x.coefficients if not isinstance(atom, (str, Node))]
    return list(dict.fromkeys([*loaded, *searched(edge)]))


def can_load(indices: tuple[Affine, ...]) -> bool:
    """Whether an edge may read a tensor at ``indices``: by sequence, by row, or at fixed places."""
    b, q = Affine({"b": 1}), Affine({"q": 1})
    known = all(i == b or i.is_constant or (i - q).is_scalar for i in indices)
    return known and all(not i["q"] for i in indices[:-1])


def searched(edge: Any) -> Iterator[Node]:
    """The ids that an edge or an interval searches."""
    if isinstance(edge, Search):
        yield edge.ids
    for part in edge if isinstance(edge, tuple) else fields(edge) if is_dataclass(edge) else ():
        yield from searched(part if isinstance(edge, tuple) else getattr(edge, part.name))


class EdgeEmitter:
    """Writes edges into a graph.

    Args:
        emit: adds a call and returns its node.
        q: query, ``[batch, heads, seqlen_q, head_dim]``.
        read: for each node that edges name the one to read: its value as the mask read it, on the device of q.
    """

    def __init__(self, emit: Callable[..., Node], q: Node, read: dict[Node, Node]) -> None:
        self.emit, self.q, self.read = emit, q, read

    def tensor(self, edge: Edge) -> Any:
        """The node (or int) of an edge, broadcastable to ``[batch, seqlen_q]``."""
        if isinstance(edge, tuple):
            total = self.tensor(edge[0])
            for part in edge[1:]:
                total = self._sum(total, self.tensor(part))
            return total
        if isinstance(edge, Affine):
            return self._affine(edge)
        if isinstance(edge, Floor):
            down = self.emit("floor_divide", self._as_tensor(self._affine(edge.numerator)), edge.divisor)
            return self.emit(operator.mul, down, edge.divisor)
        if isinstance(edge, Search):
            return self._search(edge)
        if isinstance(edge, Chosen):
            holds = self.emit(operator.ge, self._as_tensor(self._affine(edge.condition)), 0)
            return self.emit(torch.where, holds, self.tensor(edge.edge), edge.otherwise)
        pick = torch.maximum if isinstance(edge, Latest) else torch.minimum
        return self.emit(pick, *(self._as_tensor(self.tensor(x)) for x in (edge.left, edge.right)))

    def _as_tensor(self, x: Any) -> Any:
        """What maximum takes: a scalar becomes a row."""
        if isinstance(value(x), Tensor):
            return x
        return self._sum(self.emit(operator.mul, self._rows(), 0), x)

    def _rows(self) -> Node:
        length = self.emit("size", self.q, 2)
        return self.emit(torch.arange, length, device=value(self.q).device)

    def _affine(self, x: Affine) -> Any:
        total: Any = None
        for atom, factor in x.coefficients.items():
            part: Any = self._rows() if atom == "q" else self.read.get(atom, atom)
            if not isinstance(atom, (str, Node)):
                part = self._load(atom.node, atom.indices)
            total = self._sum(total, part if factor == 1 else self.emit(operator.mul, part, factor))
        return self._sum(total, x.constant) if x.constant or total is None else total

    def _sum(self, left: Any, right: Any) -> Any:
        if left is None or (isinstance(left, int) and isinstance(right, int)):
            return right if left is None else left + right
        return self.emit(operator.add, left, right)

    def _load(self, node: Node, indices: tuple[Affine, ...]) -> Node:
        """``node[b]`` as a column, ``node[b, q + t]`` as rows, ``node[3]`` as a scalar."""
        result = self.read.get(node, node)
        for dim in reversed(range(len(indices))):
            index = indices[dim]
            if index["q"]:
                result = self._at(result, index)
            elif index.is_constant:
                result = self.emit("select", result, dim, index.constant)
        per_sequence = any(i["b"] for i in indices) and not any(i["q"] for i in indices)
        return self.emit("unsqueeze", result, -1) if per_sequence else result

    def _at(self, ids: Node, row: Affine) -> Node:
        """``ids[..., row]`` for every row."""
        start = row - Affine({"q": 1})
        if start == Affine() and str(shape(ids)[-1]) == str(shape(self.q)[2]):
            return ids
        return self.emit("index_select", ids, -1, self._as_tensor(self._affine(row)))

    def _search(self, x: Search) -> Node:
        ids = self.read.get(x.ids, x.ids)
        if x.by_runs:  # a number for every run, that never falls
            changes = self.emit("ne", self.emit("narrow", ids, -1, 1, self._less_one(ids)), self._all_but_last(ids))
            ids = self.emit(torch.nn.functional.pad, self.emit("cumsum", changes, -1), (1, 0))
        wanted = self._at(ids, x.row)
        ids, wanted = (self.emit("contiguous", t) for t in (ids, wanted))
        return self.emit(torch.searchsorted, ids, wanted, right=x.right)

    def _less_one(self, ids: Node) -> Any:
        size = shape(ids)[-1]
        return size - 1 if isinstance(size, int) else self.emit(operator.sub, self.emit("size", ids, -1), 1)

    def _all_but_last(self, ids: Node) -> Node:
        return self.emit("narrow", ids, -1, 0, self._less_one(ids))

    def bounds(self, first: Edge | None, stop: Edge | None, k: Node, plain: int) -> Node:
        """``(-first, stop, plain)`` as int32 ``[batch or 1, 1, seqlen_q, 3]``; see AttentionCall.key_bounds."""
        low = self._as_tensor(self.tensor(first) if first is not None else 0)
        high = self._as_tensor(self.tensor(stop) if stop is not None else self.emit("size", k, 2))
        both = self.emit(torch.broadcast_tensors, self.emit("neg", low), high)
        low, high = (self.emit(operator.getitem, both, i) for i in (0, 1))
        stacked = self.emit(torch.stack, (low, high, self.emit(torch.full_like, high, plain)), -1)
        if len(shape(stacked)) == 2:
            stacked = self.emit("unsqueeze", stacked, 0)
        return self.emit("to", self.emit("unsqueeze", stacked, 1), torch.int32)
