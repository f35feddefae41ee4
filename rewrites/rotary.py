"""Rotary embeddings as one kernel, in a graph that runs operator by operator.

    x * cos + cat(-x_2, x_1) * sin

Models spell it in five operators for the queries and five for the keys of each layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attnpatch.fusing import Fusing
from attnpatch.graph import arg, is_one, is_plain, is_product, op, shape, value
from attnpatch.rotary import DTYPES


class Turn(NamedTuple):
    """Rows ``x`` turned by angles of these cosines and sines: ``output`` is of the shape and dtype of ``x``."""

    x: Node
    cos: Node
    sin: Node
    output: Node
    between: tuple[Node, ...]


def fuse_rotary(graph: Graph) -> int:
    """Compute every rotary embedding of a torch-level graph by ``attnpatch::rotary``; how many there were.

    It rounds once, at the end, where models round three times. Two that turn by the same angles, as queries and keys
    do, are one call. What is not spelled as such a turn exactly, or is written in place on the way, stays as it is.
    """
    fusing, sums = Fusing(graph), [node for node in graph.nodes if op(node) == "add"]
    found = 0
    while turn := _next_turn(sums):
        rest = list(sums)
        beside = _next_turn(rest)
        if beside and _are_together(turn, beside) and _put(fusing, turn, beside):
            sums, found = rest, found + 2
        else:
            found += _put(fusing, turn)
    return found


def _next_turn(sums: list[Node]) -> Turn | None:
    """The first turn of these nodes, of which it and those before it are taken away."""
    while sums:
        if turn := _turn(sums.pop(0)):
            return turn
    return None


def _are_together(turn: Turn, other: Turn) -> bool:
    """Whether one call can stand in the place of the first for both."""
    same = (turn.cos, turn.sin) == (other.cos, other.sin) and shape(turn.x)[-1] == shape(other.x)[-1]
    return same and other.x < turn.output


def _put(fusing: Fusing, *turns: Turn) -> bool:
    args = ([turn.x for turn in turns], turns[0].cos, turns[0].sin)
    between = [node for turn in turns for node in turn.between]
    return fusing.put(torch.ops.attnpatch.rotary.default, args, [turn.output for turn in turns], between)


def _turn(output: Node) -> Turn | None:
    """What an addition adds up, if that is a turn."""
    if len(output.args) != 2 or output.kwargs or not all(map(is_product, output.args)):
        return None
    left, right = output.args
    products: list[tuple[Any, Any]] = [(left, right), (right, left)]
    for straight, across in products:
        for x, cos in _orders(straight):
            for halves, sin in _orders(across):
                between = _halves_of(halves, x)
                if between and _is_one_kind(x, cos, sin, output):
                    return Turn(x, cos, sin, output, (straight, across, halves, *between))
    return None


def _orders(product: Any) -> list[tuple[Any, Any]]:
    left, right = product.args
    return [(left, right), (right, left)]


def _halves_of(node: Any, x: Any) -> tuple[Node, ...]:
    """The nodes between ``x`` and ``cat(-x_2, x_1)``; none if ``node`` is something else."""
    if op(node) != "cat" or not is_plain(x) or value(x).dim() != 4 or arg(node, 1, "dim", 0) not in (-1, 3):
        return ()
    parts = arg(node, 0, "tensors")
    if len(parts) != 2 or op(parts[0]) != "neg":
        return ()
    second: Any = arg(parts[0], 0, "input")
    first: Any = parts[1]
    return (parts[0], second, first) if (_half_of(second, x), _half_of(first, x)) == (1, 0) else ()


def _half_of(node: Any, x: Node) -> int | None:
    """Which half of the channels of ``x`` a node is: 0, 1, or None."""
    channels = shape(x)[-1]
    if op(node) != "getitem" or not isinstance(channels, int) or channels % 2:
        return None
    source, index = node.args
    if op(source) in ("chunk", "split"):
        return index if index in (0, 1) and _is_in_two(source, x) else None
    if source is not x or not isinstance(index, tuple) or len(index) != 2 or index[0] is not Ellipsis:
        return None
    middle, ends = channels // 2, _ends(index[1])
    return 0 if ends in ((None, middle), (0, middle)) else 1 if ends in ((middle, None), (middle, channels)) else None


def _ends(index: Any) -> Any:
    return (index.start, index.stop) if isinstance(index, slice) and index.step in (None, 1) else None


def _is_in_two(source: Node, x: Node) -> bool:
    """Whether ``source`` divides the channels of ``x`` in two."""
    size = 2 if op(source) == "chunk" else shape(x)[-1] // 2
    last = arg(source, 2, "dim", 0) in (-1, 3)
    return last and source.args[:2] == (x, size)


def _is_one_kind(x: Node, cos: Any, sin: Any, output: Node) -> bool:
    """Whether the operator takes these and gives what the graph does."""
    if not all(is_plain(t) and value(t).dtype in DTYPES and value(t).device == value(x).device for t in (x, cos, sin)):
        return False
    same = value(x).dtype == value(output).dtype and len(shape(output)) == 4
    return same and _fits(output, x) and _fits(x, output) and all(_fits(t, x) for t in (cos, sin))


def _fits(t: Node, x: Node) -> bool:
    """Whether ``t`` is known to broadcast to the shape of ``x``."""
    sizes = zip(reversed(shape(t)), reversed(shape(x)), strict=False)
    known = all(is_one(size) or statically_known_true(size == whole) for size, whole in sizes)
    return known and len(shape(t)) <= len(shape(x))
