"""Read a mask back as an expression of its element at (b, h, q, k).

A mask is a small graph over aranges, comparisons and broadcasts. Asking for its element at symbolic indices and
pushing the question through every operation to its inputs ("pulling the indices back") removes all spelling:

    where(le(arange(n)[None, None, None, :], arange(n)[None, None, :, None] + 4), 0.0, -inf)  at (b, h, q, k)
        ->  Where(AtLeastZero(q + 4 - k), Const(0.0), Const(-inf))

An operation nobody knows becomes a leaf: ``Load(node, indices)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import Node

from attnpatch.affine import Affine, scalar_affine
from attnpatch.graph import VIEWS, Writes, is_one, op, shape, value
from attnpatch.rewrites.computed_elements import COMPUTED_ELEMENTS
from attnpatch.rewrites.expressions import (
    Const,
    Load,
    Unknown,
    loads,
)
from attnpatch.rewrites.view_elements import VIEW_ELEMENTS


class Pullback:
    """Pull indices back through a graph; remembers which nodes it read, and where scalars were read.

    Attributes:
        writes: the graph's in-place writes.
        views_only: whether only views are looked through, so that elements of one tensor are seen to be that.
        levels: inside vmap, the index of what each level runs over.
        now: the node that reads what is being looked at; a tensor may hold something else for another.
        readers: for each node that became an atom of an Affine, the node that read it.
    """

    def __init__(self, writes: Writes, now: Node) -> None:
        self.writes = writes
        self.now = now
        self.views_only = False
        self.levels: dict[int, Affine] = {}
        self.readers: dict[Node, Node] = {}

    def element(self, x: Any, indices: tuple[Affine, ...]) -> Any:
        """The element of ``x`` at ``indices``, one per dimension of ``x``; Affine when it is an integer."""
        if not isinstance(x, Node):
            return _constant(x)
        scalar = scalar_affine(x)
        if scalar is not None and (not isinstance(value(x), Tensor) or op(x) not in OPERATIONS):
            return scalar
        if not isinstance(value(x), Tensor):
            raise Unknown(x)
        operation = OPERATIONS.get(op(x)) or OPERATIONS.get(op(x).removesuffix("_"))  # x.triu_() of what x was
        if self.views_only and op(x) not in (*VIEWS, "index"):
            operation = None
        if operation is None or self.writes.between(x, x, self.now):  # written: its operation is not what it holds
            return Load(x, indices)
        reader = self.now
        try:
            self.now = reader if op(x) in VIEWS else x  # through a view, the memory is read later
            return operation(self, x, indices)
        except Unknown:
            return Load(x, indices)
        finally:
            self.now = reader

    def indices(self, reader: Node, tensors: list[Node], lead: tuple[Affine, ...]) -> list[Any]:
        """The elements of tensors that index another one: looked through even where that one is not."""
        views_only, self.views_only = self.views_only, False
        try:
            return [self.operand(reader, t, lead) for t in tensors]
        finally:
            self.views_only = views_only

    def inside(self, x: Any, indices: tuple[Affine, ...]) -> Any:
        """The element of a tensor inside vmap, which no code outside can load."""
        result = self.element(x, indices)
        if any(_vmap_levels(load.node) for load in loads(result)):
            raise Unknown(x)
        return result

    def operand(self, reader: Node, x: Any, indices: tuple[Affine, ...]) -> Any:
        """The element of ``x`` where ``reader``, of the given indices, reads it under broadcasting."""
        if isinstance(x, Node) and isinstance(value(x), Tensor):
            scalar = scalar_affine(x)
            if scalar is not None and x in scalar.coefficients:
                first = self.readers.setdefault(x, self.now)
                if self.writes.between(x, first, self.now) or self.writes.between(x, self.now, first):
                    raise Unknown(x)  # one scalar, two values
            return self.element(x, broadcast(indices, x))
        return self.element(x, ())


def _vmap_levels(node: Node, depth: int = 32) -> set[int]:
    """The levels of vmap that ``node`` is inside of: those that what it is made of enters and does not leave."""
    levels: set[int] = set()
    for x in node.all_input_nodes if depth else ():
        levels |= _vmap_levels(x, depth - 1)
    if op(node) == "_add_batch_dim":
        levels.add(node.args[2])  # type: ignore[arg-type]
    if op(node) == "_remove_batch_dim":
        levels.discard(node.args[1])
    return levels


def broadcast(indices: tuple[Affine, ...], x: Node) -> tuple[Affine, ...]:
    """Indices into ``x`` that, right-aligned, broadcast to ``indices``: size-1 dimensions are read at 0."""
    sizes = shape(x)
    aligned = indices[len(indices) - len(sizes) :]
    return tuple(Affine() if is_one(s) else i for s, i in zip(sizes, aligned, strict=True))


def _constant(x: Any) -> Any:
    if isinstance(x, bool) or (isinstance(x, int) and not isinstance(x, bool)):
        return Const(float(x)) if isinstance(x, bool) else Affine(constant=x)
    if isinstance(x, float):
        return Const(x)
    raise Unknown(x)


OPERATIONS: dict[str, Callable[..., Any]] = {**COMPUTED_ELEMENTS, **VIEW_ELEMENTS}
