"""Root-mean-square norms as one kernel, torch's own, in a graph that runs operator by operator.

    weight * (x * rsqrt(mean(x^2) + eps))        Zhang and Sennrich, arXiv 1910.07467

Models spell it in six to eight operators. A decode step is so short that the host, or the space between kernels in a
CUDA graph, is what it waits for there: a Llama has two norms per layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from attnpatch.graph import Writes, arg, emit, erase_dead, is_scalar, is_tensor, op, shape, value, varargs


class Norm(NamedTuple):
    """A norm over the last dimension of ``x``: ``output`` is of the shape and dtype of ``x``."""

    x: Node
    weight: Node
    eps: float
    output: Node


def fuse_norms(graph: Graph) -> int:
    """Compute every norm of a torch-level graph by ``torch.nn.functional.rms_norm``; how many there were.

    It rounds once, at the end, where models round before they multiply by the weight, too. What is not spelled as such
    a norm exactly stays as it is.
    """
    writes = Writes(graph)
    norms = [norm for node in graph.nodes if op(node) == "rsqrt" and (norm := _norm(node))]
    norms = [norm for norm in norms if not any(writes.touches(x) for x in (norm.x, norm.weight))]
    return sum(_fuse(graph, norm) for norm in norms)


def _fuse(graph: Graph, norm: Norm) -> bool:
    with graph.inserting_before(norm.output):
        size = list(shape(norm.x)[-1:])
        fused = emit(graph, F.rms_norm, norm.x, size, norm.weight, norm.eps, like=norm.output)
    if value(fused).dtype != value(norm.output).dtype:  # autocast has a dtype of its own for it
        graph.erase_node(fused)
        return False
    norm.output.replace_all_uses_with(fused)
    erase_dead(graph, [norm.output])
    return True


def _norm(rsqrt: Node) -> Norm | None:
    """The norm whose inverse root this is."""
    found, scaled = _mean_square(rsqrt), _only_user(rsqrt)
    if found is None or op(scaled) != "mul":
        return None
    wide, eps = found
    x = _source(wide)
    if set(scaled.args) not in ({wide, rsqrt}, {x, rsqrt}):
        return None
    normed = _past_cast(scaled)
    weighted = _only_user(normed)
    if op(weighted) != "mul":
        return None
    weight = weighted.args[1] if weighted.args[0] is normed else weighted.args[0]
    output = weighted if value(weighted).dtype == value(x).dtype else _past_cast(weighted)
    if not is_tensor(weight) or shape(weight) != shape(x)[-1:]:
        return None
    one_dtype = value(weight).dtype == value(x).dtype == value(output).dtype
    return Norm(x, weight, eps, output) if one_dtype else None


def _mean_square(rsqrt: Node) -> tuple[Node, float] | None:
    """``wide`` and ``eps`` of ``rsqrt(mean(wide^2, -1) + eps)`` in float32."""
    total = arg(rsqrt, 0, "input")
    if op(total) != "add" or not isinstance(total.args[1], float):
        return None
    mean = total.args[0]
    if op(mean) != "mean" or varargs(mean, 1, "dim")[:1] != [-1] or not arg(mean, 2, "keepdim", False):
        return None
    square = arg(mean, 0, "input")
    if op(square) != "pow" or not is_scalar(square.args[1]) or square.args[1] != 2:
        return None
    wide = square.args[0]
    return (wide, total.args[1]) if value(wide).dtype == value(rsqrt).dtype == torch.float32 else None


def _source(wide: Node) -> Node:
    """What was cast to float32, or ``wide`` itself."""
    source: Any = arg(wide, 0, "input") if op(wide) in ("to", "float") else None
    return source if is_tensor(source) and value(source).is_floating_point() else wide


def _past_cast(node: Node) -> Node:
    """The cast that alone reads ``node``, or ``node``."""
    user = _only_user(node)
    return user if op(user) in ("to", "type_as") and user.args[0] is node else node


def _only_user(node: Node) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None
