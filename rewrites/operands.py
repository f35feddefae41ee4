"""From the operands of the two products back to q, k and v as the kernels want them: without repeats and copies.

Every look undoes one node: a permutation reorders the dims, a view regroups them, and where a node repeats along an
axis the source does not have that axis: K of a group of query heads lacks the axis "head within its group".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from attnpatch.axes import Axes, Dims
from attnpatch.graph import Writes, arg, is_tensor, memory, op, shape, value
from attnpatch.rewrites.kv_repeat import REPEATS
from attnpatch.rewrites.products import permutation
from attnpatch.rule import Operand

RESHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
"""Operations that regroup dimensions, in order; so does indexing with None."""


class Reading(NamedTuple):
    """When the original reads q, k and v, and when the operator does.

    Args:
        writes: the graph's in-place writes.
        operands: q, k and v as the products have them.
        products: who multiplies each.
        anchor: where the operator goes.
    """

    writes: Writes
    operands: tuple[Node, Node, Node]
    products: tuple[Node, Node, Node]
    anchor: Node

    def is_kept(self, node: Node, source: Node) -> bool:
        """Whether ``node`` still holds what it was made of: it is a view of ``source``, or no one wrote into it."""
        return memory(node) == memory(source) or self.writes.between(node, node, self.anchor) is None


def peel(operand: Operand, axes: Axes, reading: Reading, shared: Dims = ()) -> list[Operand]:
    """The operand less what the kernels do not need: copies, upcasts, repeats along the head axes of ``shared``.

    Returns:
        The same values as several nodes, dims reordered or regrouped; the outermost first.
    """
    choices = [operand]
    while not choices[-1].steps:
        look = _look(choices[-1], axes, shared)
        if look is None or not reading.is_kept(choices[-1].node, look[0].node):
            break
        source, lost = look
        choices = [source] if lost or _is_copy(choices[-1].node) else [*choices, source]
    return choices


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


def names(dims: Dims, axes: Axes) -> set[str]:
    """The axes of a tensor."""
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
            lost = names(dims, axes) - names(found.dims, axes)
            return (found, lost) if lost <= set(head_axes(shared, axes)) else None
    return None


def regroups(node: Node) -> bool:
    """Whether ``node`` only regroups the dimensions of its input."""
    if op(node) in RESHAPES:  # but view(dtype), which reads other numbers
        return bool(value(node).dtype == value(arg(node, 0, "input")).dtype)
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


def read(source: Node, operand: Node, reader: Node) -> tuple[Node, Node]:
    """``source`` and the node that reads its memory on its way to ``operand`` of ``reader``.

    Repeats, casts and gathers copy: what is written to the source after that node does not reach the product.
    """
    own = memory(source)
    for node, _ in way(operand, source):
        reader = node if memory(node) != own else reader
    return source, reader


def way(operand: Node, source: Node) -> Iterator[tuple[Node, Node]]:
    """Each node on the way from ``operand`` to what it is made of, with the next one."""
    while operand is not source:
        node, operand = operand, next(x for x in operand.all_input_nodes if x is source or source in lineage(x))
        yield node, operand


def lineage(node: Node, depth: int = 32) -> set[Node]:
    """What ``node`` is made of."""
    above, level = set[Node](), {node}
    for _ in range(depth):
        level = {x for n in level for x in n.all_input_nodes} - above
        above |= level
    return above


def said(size: Any) -> str:
    """A shape as text."""
    return f"[{', '.join(str(s) for s in size)}]"
