"""One call in the place of several operators, in a graph that runs operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.fx import Graph, Node

from attnpatch.graph import Writes, emit, erase_dead, op, value


class Fusing:
    """Calls put in the place of several nodes of a graph, where nothing else depends on how these compute.

    Args:
        graph: of operators at torch's level.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph, self._writes, self._apart = graph, Writes(graph), _in_own_modes(graph)

    def put(self, target: Callable[..., Any], args: Sequence[Any], output: Node, between: Iterable[Node]) -> bool:
        """Let ``target(*args)`` stand for ``output``; False, and nothing is changed, where it might be another value.

        Args:
            target: what is called.
            args: of it, nodes and constants.
            output: a node that gives the same.
            between: the nodes by which it came from ``args``.
        """
        read = (*(x for x in args if isinstance(x, Node)), *between)
        if output in self._apart or any(map(self._writes.touches, read)):
            return False
        with self._graph.inserting_before(output):
            fused = emit(self._graph, target, *args, like=output)
        if value(fused).dtype != value(output).dtype:  # autocast around the graph may have one of its own for it
            self._graph.erase_node(fused)
            return False
        output.replace_all_uses_with(fused)
        erase_dead(self._graph, [output])
        return True


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
