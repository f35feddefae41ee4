"""``rewrite``: the pass alone, for people with an FX pipeline of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule

import attnpatch.ops  # noqa: F401  (registers the operator)
from attnpatch.errors import AttentionNotPatched
from attnpatch.graph import value
from attnpatch.options import from_keywords, of_graphs
from attnpatch.reporting import GraphRecord, Report
from attnpatch.rewriter import record_shapes, rewrite_graph


def rewrite(graph_module: GraphModule, example_inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, Report]:
    """Rewrite the attentions of a graph.

    Args:
        graph_module: from Dynamo or ``torch.fx``; it is not changed. Parameters and submodules are shared.
        example_inputs: its inputs; used only when the graph carries no shapes of its own.
        options: ``backends``, ``batch_invariant``, ``prefill_dtype`` and ``strict``, see
            :class:`attnpatch.options.Options`.

    Returns:
        The rewritten graph module, and the report of its sites.

    Raises:
        AttentionNotPatched: under ``strict``, when a site is refused.
        TypeError: an option is unknown, or one of those that say how a graph is run.
        ValueError: an option's value is not allowed, or it is ``cache``, which is for ``patch``.
    """
    for name in ("rest", "cuda_graphs"):
        if name in options:
            raise TypeError(f"{name}={options[name]!r} says how a graph is run, and rewrite runs none: use patch")
    chosen = from_keywords(of_graphs(options))
    copy = _copy(graph_module)
    _inline_leaf_modules(copy)
    if any(value(node) is None for node in copy.graph.nodes if node.op == "placeholder"):
        record_shapes(copy, example_inputs)
    sites = rewrite_graph(copy.graph, chosen.arguments)
    copy.recompile()
    refused = [f"{site.module or site.place}: {site.reason}" for site in sites if not site.fused]
    if refused and chosen.strict:
        raise AttentionNotPatched(refused)
    return copy, Report([GraphRecord(sites)], Counter())


def _copy(graph_module: GraphModule) -> GraphModule:
    """A copy of the graph and of the graphs nested in it, over the same parameters and submodules."""
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    graph.set_codegen(deepcopy(graph_module.graph._codegen))  # torch.export's takes arguments and output apart
    module = GraphModule(graph_module, graph)
    for name, child in list(module.named_children()):
        if isinstance(child, GraphModule):
            setattr(module, name, _copy(child))
    return module


def _inline_leaf_modules(module: GraphModule) -> None:
    """Calls of nn.Softmax and nn.Dropout, which ``torch.fx`` keeps whole, become calls of their functions."""
    for node in list(module.graph.nodes):
        if node.op != "call_module":
            continue
        leaf = module.get_submodule(str(node.target))
        with module.graph.inserting_before(node):
            if isinstance(leaf, nn.Softmax):
                call = module.graph.call_function(torch.softmax, (node.args[0], leaf.dim))
            elif isinstance(leaf, nn.Dropout):
                call = module.graph.call_function(F.dropout, (node.args[0], leaf.p, leaf.training))
            else:
                continue
        call.meta.update(node.meta)
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
