"""From the operands of the two products back to q, k and v as the kernels want them: without repeats and copies.

Every look undoes one node: a permutation reorders the dims, a view regroups them, and where a node repeats along an
axis the source does not have that axis: K of a group of query heads lacks the axis "head within its group".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from attnpatch.axes import Axes, Dims, Layout
from attnpatch.errors import Refused
from attnpatch.graph import arg, is_tensor, op, shape, value
from attnpatch.rewrites.kv_repeat import REPEATS
from attnpatch.rewrites.products import permutation
from attnpatch.rule import Operand

RESHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
"""Operations that regroup dimensions, in order; so does indexing with None."""


def peel(operand: Operand, axes: Axes, shared: Dims = ()) -> list[Operand]:
    """The operand less what the kernels do not need: copies, upcasts, repeats along the head axes of ``shared``.

    Returns:
        The same values as several nodes, dims reordered or regrouped; the outermost first.
    """
    choices = [operand]
    while True:
        look = _look(choices[-1], axes, shared)
        if look is None:
            return choices
        source, lost = look
        choices = [source] if lost or _is_copy(choices[-1].node) else [*choices, source]


def batch_axes(shared: Dims, axes: Axes) -> tuple[str, ...]:
    """The batch: of the dimensions that q, k and v share the first, or the first part of a single one."""
    if not shared:
        return ()
    first = axes.resolve(shared)[0]
    return first if len(shared) > 1 else first[:1]


def head_axes(shared: Dims, axes: Axes) -> tuple[str, ...]:
    """The heads: what else q, k and v share."""
    every = tuple(axis for dim in axes.resolve(shared) for axis in dim)
    return every[len(batch_axes(shared, axes)) :]


def _names(dims: Dims, axes: Axes) -> set[str]:
    return {axis for dim in axes.resolve(dims) for axis in dim}


def _look(x: Operand, axes: Axes, shared: Dims) -> tuple[Operand, set[str]] | None:
    """The operand that ``x`` is made of, and the axes it lacks."""
    dims = axes.resolve(x.dims)
    inner = _upcast_or_copy(x.node) or _cat_with_empty(x.node)
    if inner is not None:
        return Operand(inner, dims), set()
    order = permutation(x.node)
    if order is not None:
        source: list[tuple[str, ...]] = [()] * len(order)
        for i, place in enumerate(order):
            source[place] = dims[i]
        return Operand(arg(x.node, 0, "input"), tuple(source)), set()
    if regroups(x.node):
        inner = arg(x.node, 0, "input")
        regrouped = axes.regroup(dims, shape(x.node), shape(inner))
        return None if regrouped is None else (Operand(inner, regrouped), set())
    return _unrepeated(x.node, dims, axes, shared)


def _unrepeated(node: Node, dims: Dims, axes: Axes, shared: Dims) -> tuple[Operand, set[str]] | None:
    for spelling in REPEATS:
        found = spelling(node, dims, axes)
        if found is not None:
            lost = _names(dims, axes) - _names(found.dims, axes)
            return (found, lost) if lost <= set(head_axes(shared, axes)) else None
    return None


def regroups(node: Node) -> bool:
    """Whether ``node`` only regroups the dimensions of its input."""
    if op(node) in RESHAPES:
        return True
    if op(node) != "getitem" or not is_tensor(node) or not is_tensor(arg(node, 0, "input")):
        return False
    items = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(i is None or i is Ellipsis or (isinstance(i, slice) and i == slice(None)) for i in items)


def _is_copy(node: Node) -> bool:
    return _upcast_or_copy(node) is not None or _cat_with_empty(node) is not None


def _upcast_or_copy(node: Node) -> Node | None:
    """``x.float()``, ``x.contiguous()``: kernels multiply in x's dtype, accumulate in fp32 and take any strides."""
    if op(node) not in ("to", "float", "type", "contiguous", "double") or not is_tensor(arg(node, 0, "input")):
        return None
    narrow, wide = value(arg(node, 0, "input")).dtype, value(node).dtype
    kept = narrow == wide or (wide == torch.float32 and narrow in (torch.float16, torch.bfloat16))
    return arg(node, 0, "input") if kept and value(node).device == value(arg(node, 0, "input")).device else None


def _cat_with_empty(node: Node) -> Node | None:
    """``cat([torch.tensor([]), x])``: the first update of a dynamic cache."""
    if op(node) != "cat":
        return None
    parts = [p for p in arg(node, 0, "tensors") if shape(p) != torch.Size([0])]
    return parts[0] if len(parts) == 1 else None


class Roles(NamedTuple):
    """What the dimensions of the two products are.

    Args:
        shared: q, k and the scores have them, in the scores' order.
        rows: only q has them, the query rows last.
        key: softmax is over it.
        feature: the first product sums over it.
        feature_v: only v and the output have it.
    """

    shared: Dims
    rows: Dims
    key: tuple[str, ...]
    feature: tuple[str, ...]
    feature_v: tuple[str, ...]


class Arrangement:
    """How q, k and v of one attention become ``[batch, heads, seqlen, head_dim]``.

    Attributes:
        layout: which axes are batch, heads (of K first, then within a group), rows and keys.
        feature_v: the axes of v's features.
        sizes: num_heads, num_kv_heads and head_dim.
        seqlens: seqlen_q and seqlen_k.
    """

    def __init__(self, axes: Axes, q: Operand, k: Operand, v: Operand, roles: Roles) -> None:
        self.axes = axes
        peeled = [peel(q, axes), peel(k, axes, roles.shared), peel(v, axes, roles.shared)]
        if self._absent(peeled[1], roles) != self._absent(peeled[2], roles):  # repeated apart: as they are
            peeled[1:] = [peel(k, axes), peel(v, axes)]
        self.layout, kv_heads = self._layout(roles, self._absent(peeled[1], roles))
        feature, self.feature_v = axes.resolve((roles.feature, roles.feature_v))
        batch, heads, row, key = self.layout
        self.q = self._choose(peeled[0], (batch, heads, row, feature))
        self.k = self._choose(peeled[1], (batch, kv_heads, key, feature))
        self.v = self._choose(peeled[2], (batch, kv_heads, key, self.feature_v))
        self.sizes = (axes.size(heads), axes.size(kv_heads), axes.size(feature))
        self.seqlens = (axes.size(row), axes.size(key))
        check_dtypes(self.q, self.k, self.v)

    def _absent(self, choices: list[Operand], roles: Roles) -> set[str]:
        """Head axes that K or V does not have."""
        return set(head_axes(roles.shared, self.axes)) - _names(choices[-1].dims, self.axes)

    def _layout(self, roles: Roles, absent: set[str]) -> tuple[Layout, tuple[str, ...]]:
        every = head_axes(roles.shared, self.axes)
        kv_heads = tuple(axis for axis in every if axis not in absent)
        group = tuple(axis for axis in every if axis in absent)
        rows = self.axes.resolve(roles.rows)
        group += tuple(axis for dim in rows[:-1] for axis in dim)
        batch, key = batch_axes(roles.shared, self.axes), self.axes.resolve((roles.key,))[0]
        return Layout(batch, (*kv_heads, *group), rows[-1] if rows else (), key), kv_heads

    def _choose(self, choices: list[Operand], target: Dims) -> Operand:
        """The choice that needs the fewest steps to the dims ``target``, with those steps."""
        planned = [(self.axes.plan(self.axes.resolve(x.dims), target), x) for x in choices]
        steps, best = min(planned, key=lambda item: len(item[0]))
        absent = _names(target, self.axes) - _names(best.dims, self.axes)
        if any(self.axes.sizes[axis] != 1 for axis in absent):
            raise Refused(f"{best.node.name} {said(shape(best.node))} is broadcast over the heads or the batch")
        return Operand(best.node, self.axes.resolve(best.dims), tuple(steps))


def read(source: Node, operand: Node, reader: Node) -> tuple[Node, Node]:
    """``source`` and the node that reads it on its way to ``operand`` of ``reader``.

    Repeats and casts copy: what is written to the source after that node does not reach the product.
    """
    while operand is not source:
        inputs = operand.all_input_nodes
        reader, operand = operand, next(x for x in inputs if x is source or source in _lineage(x))
    return source, reader


def _lineage(node: Node, depth: int = 12) -> set[Node]:
    above = set(node.all_input_nodes)
    return above.union(*(_lineage(x, depth - 1) for x in above)) if depth else above


def check_dtypes(*operands: Operand) -> None:
    """Refuse q, k and v of different dtypes."""
    dtypes = [value(x.node).dtype for x in operands]
    if len(set(dtypes)) != 1:
        raise Refused(f"q, k and v have different dtypes: {', '.join(str(d) for d in dtypes)}")


def said(size: Any) -> str:
    """A shape as text."""
    return f"[{', '.join(str(s) for s in size)}]"
