"""Calls that hide attention behind one name, replaced in a graph by the operations they stand for."""

from __future__ import annotations

import operator
from collections.abc import Generator
from contextlib import closing
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from attnpatch.graph import erase_dead, value

HIDING = (F.multi_head_attention_forward,)
"""Python functions that Dynamo keeps as one node: what ``nn.MultiheadAttention`` calls."""


def inline_calls(graph: Graph) -> None:
    """Replace every call of a function of HIDING whose sizes are known by what it does."""
    with closing(_under_autocast(graph)) as nodes:
        for node in nodes:
            if node.op == "call_function" and node.target in HIDING and _is_static(node):
                _inline(graph, node)


def _under_autocast(graph: Graph) -> Generator[Node, None, None]:
    """Every node, while autocast is what it will be when the graph runs it: what is traced then has its dtypes."""
    entered: dict[Node, Any] = {}
    try:
        for node in list(graph.nodes):
            if node.target is _enter_autocast:
                entered[node] = _enter_autocast(*node.args)
            elif node.target is _exit_autocast:
                _exit_autocast(entered.pop(node.args[0]))
            yield node
    finally:
        for mode in reversed(entered.values()):
            _exit_autocast(mode)


def _is_static(node: Node) -> bool:
    """Whether no size is symbolic: tracing with sizes that are numbers would make constants of the others."""
    tensors = [value(x) for x in node.all_input_nodes if isinstance(value(x), Tensor)]
    return all(isinstance(size, int) for x in tensors for size in x.shape) and len(tensors) == len(node.all_input_nodes)


def _inline(graph: Graph, node: Node) -> None:
    flat, spec = tree_flatten((node.args, dict(node.kwargs)))
    places = [i for i, x in enumerate(flat) if isinstance(x, Node)]

    def run(*tensors: Tensor) -> Any:
        given = list(flat)
        for i, tensor in zip(places, tensors, strict=True):
            given[i] = tensor
        args, kwargs = tree_unflatten(given, spec)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with torch.no_grad():
        traced = make_fx(run, pre_dispatch=True)(*(value(flat[i]) for i in places))
    copies: dict[Node, Any] = dict(
        zip((n for n in traced.graph.nodes if n.op == "placeholder"), (flat[i] for i in places), strict=True)
    )
    with graph.inserting_before(node):
        results = graph.graph_copy(traced.graph, copies)
    for original, copied in copies.items():
        if isinstance(copied, Node) and original.op == "call_function":
            _describe(copied, original, node)
    _hand_over(graph, node, results)
    erase_dead(graph, [n for n in reversed(list(copies.values())) if isinstance(n, Node)])  # averaged weights


def _describe(copied: Node, original: Node, call: Node) -> None:
    """Metadata of an inlined node: its fake value, and the place of the call."""
    copied.meta = {key: call.meta[key] for key in ("nn_module_stack", "stack_trace") if key in call.meta}
    copied.meta["example_value"] = original.meta.get("val")


def _hand_over(graph: Graph, node: Node, results: Any) -> None:
    """Give the readers of ``node[i]`` the result i."""
    for user in list(node.users):
        if user.op == "call_function" and user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    if not node.users:
        graph.erase_node(node)
