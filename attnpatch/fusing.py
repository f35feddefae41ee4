"""One call in the place of several operators, in a graph that runs operator by operator."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from attnpatch.graph import Writes, emit, erase_dead, op, value


class Fusing:
    """Calls put in the place of several nodes of a graph, where nothing else depends on how these compute.

    Args:
        graph: of operators at torch's level.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph, self._writes, self._apart = graph, Writes(graph), _in_own_modes(graph)

    def put(
        self, target: Callable[..., Any], args: Sequence[Any], outputs: Sequence[Node], between: Iterable[Node]
    ) -> bool:
        """Let ``target(*args)`` stand for ``outputs``; False, and nothing is changed, where it might be another value.

        Args:
            target: what is called; it gives a tensor, or a list of them.
            args: of it, nodes, lists of nodes and constants.
            outputs: nodes that give the same, in the graph's order.
            between: the nodes by which they came from ``args``.
        """
        read = (*(x for x in tree_leaves(args) if isinstance(x, Node)), *between)
        if self._apart.intersection(outputs) or any(map(self._writes.touches, read)):
            return False
        with self._graph.inserting_before(outputs[0]):
            fused = self._values(emit(self._graph, target, *args, like=outputs[0]), outputs)
        if [value(x).dtype for x in fused] != [value(x).dtype for x in outputs]:  # autocast around may have one for it
            erase_dead(self._graph, fused)
            return False
        for output, stands_for_it in zip(outputs, fused, strict=True):
            output.replace_all_uses_with(stands_for_it)
        erase_dead(self._graph, outputs)
        return True

    def _values(self, call: Node, outputs: Sequence[Node]) -> list[Node]:
        """The tensors that it gives, a node each."""
        if not isinstance(value(call), list):
            return [call]
        return [emit(self._graph, operator.getitem, call, i, like=output) for i, output in enumerate(outputs)]


def _in_own_modes(graph: Graph) -> set[Node]:
    """The nodes that may record gradients, or compute in dtypes of autocast's, though the graph's caller does not."""
    found: set[Node] = set()
    entered: list[Node] = []
    records = False
    for node in graph.nodes:
        if op(node) in ("_enter_autocast", "_enter_inference_mode"):
            entered.append(node)
        elif op(node) in ("_exit_autocast", "_exit_inference_mode"):
            entered.remove(node.args[0])
        elif op(node) == "_set_grad_enabled":
            records = bool(node.args[0])
        if records or any(op(x) == "_enter_autocast" or x.args[0] is False for x in entered):
            found.add(node)
    return found
