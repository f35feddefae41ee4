"""Rotary embeddings as one kernel, in a graph that runs operator by operator.

    x * cos + cat(-x_2, x_1) * sin

Models spell it in five operators for the queries and five for the keys of each layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from attnpatch.graph import Writes, arg, emit, erase_dead, is_tensor, op, shape, value
from attnpatch.rotary import DTYPES, fits


class Turn(NamedTuple):
    """Rows ``x`` turned by angles of these cosines and sines: ``output`` is of the shape and dtype of ``x``."""

    x: Node
    cos: Node
    sin: Node
    output: Node


def fuse_rotary(graph: Graph) -> int:
    """Compute every rotary embedding of a torch-level graph by ``attnpatch::rotary``; how many there were.

    It rounds once, at the end, where models round three times. What is not spelled as such a turn exactly stays.
    """
    writes = Writes(graph)
    turns = [turn for node in graph.nodes if op(node) == "add" and (turn := _turn(node))]
    turns = [turn for turn in turns if not any(writes.touches(node) for node in turn[:3])]
    for x, cos, sin, output in turns:
        with graph.inserting_before(output):
            turned = emit(graph, torch.ops.attnpatch.rotary.default, x, cos, sin, like=output)
        output.replace_all_uses_with(turned)
        erase_dead(graph, [output])
    return len(turns)


def _turn(output: Node) -> Turn | None:
    """What an addition adds up, if that is a turn."""
    if len(output.args) != 2 or output.kwargs or not all(op(x) == "mul" for x in output.args):
        return None
    for straight, across in (output.args, reversed(output.args)):
        for x, cos in _orders(straight):
            for halves, sin in _orders(across):
                if _is_turned(halves, x) and _is_one_kind(x, cos, sin, output):
                    return Turn(x, cos, sin, output)
    return None


def _orders(product: Any) -> list[tuple[Any, Any]]:
    left, right = product.args[:2]
    return [(left, right), (right, left)]


def _is_turned(node: Any, x: Any) -> bool:
    """Whether ``node`` is ``cat(-x_2, x_1)``."""
    if op(node) != "cat" or not is_tensor(x) or arg(node, 1, "dim", 0) not in (-1, value(x).dim() - 1):
        return False
    parts = arg(node, 0, "tensors")
    if len(parts) != 2 or op(parts[0]) != "neg":
        return False
    return _half_of(parts[0].args[0], x) == 1 and _half_of(parts[1], x) == 0


def _half_of(node: Any, x: Node) -> int | None:
    """Which half of the channels of ``x`` a node is: 0, 1, or None."""
    if op(node) != "getitem":
        return None
    source, index = node.args
    if op(source) in ("chunk", "split"):
        return index if _halves(source, x) and index in (0, 1) else None
    channels, middle = shape(x)[-1], shape(x)[-1] // 2
    if source is not x or not isinstance(index, tuple) or channels != 2 * middle:
        return None
    if index[0] is not Ellipsis or len(index) != 2:
        return None
    return {(None, middle): 0, (0, middle): 0, (middle, None): 1, (middle, channels): 1}.get(_ends(index[1]))


def _ends(index: Any) -> Any:
    return (index.start, index.stop) if isinstance(index, slice) and index.step in (None, 1) else None


def _halves(source: Any, x: Node) -> bool:
    """Whether ``source`` divides the channels of ``x`` in two."""
    size = 2 if op(source) == "chunk" else shape(x)[-1] // 2
    last = arg(source, 2, "dim", 0) in (-1, value(x).dim() - 1)
    return source.args[0] is x and last and source.args[1:2] == (size,) and shape(x)[-1] % 2 == 0


def _is_one_kind(x: Node, cos: Any, sin: Any, output: Node) -> bool:
    """Whether the operator takes these and gives what the graph does."""
    if not all(is_tensor(t) and value(t).dtype in DTYPES for t in (x, cos, sin)):
        return False
    same = (shape(x), value(x).dtype) == (shape(output), value(output).dtype)
    return same and value(x).dim() == 4 and all(fits(value(t), value(x)) for t in (cos, sin))
