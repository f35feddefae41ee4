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

from attnpatch.fusing import Fusing
from attnpatch.graph import CASTS, arg, is_plain, is_product, is_scalar, normal_dim, only_user, op, shape, value


class Norm(NamedTuple):
    """A norm over the last dimension of ``x``: ``output`` is of the shape and dtype of ``x``."""

    x: Node
    weight: Node
    eps: float
    output: Node
    between: tuple[Node, ...]


def fuse_norms(graph: Graph) -> int:
    """Compute every norm of a torch-level graph by ``torch.nn.functional.rms_norm``; how many there were.

    It rounds once, at the end, where models round before they multiply by the weight, too. What is not spelled as such
    a norm exactly, or is written in place on the way, stays as it is.
    """
    fusing, roots = Fusing(graph), [node for node in graph.nodes if op(node) == "rsqrt"]
    return sum(_put(fusing, norm) for rsqrt in roots if (norm := _norm(rsqrt)))


def _put(fusing: Fusing, norm: Norm) -> bool:
    args = (norm.x, list(shape(norm.x)[-1:]), norm.weight, norm.eps)
    return fusing.put(F.rms_norm, args, (norm.output,), norm.between)


def _norm(rsqrt: Node) -> Norm | None:
    """The norm whose inverse root this is."""
    found, scaled = _mean_square(rsqrt), only_user(rsqrt)
    if found is None or not is_product(scaled):
        return None
    wide, eps, *before = found
    x = _source(wide)
    if set(scaled.args) not in ({wide, rsqrt}, {x, rsqrt}):
        return None
    casts = _cast(scaled)
    normed, weighted = casts[-1], only_user(casts[-1])
    if not is_product(weighted):
        return None
    weight = weighted.args[1] if weighted.args[0] is normed else weighted.args[0]
    output = next((y for y in _cast(weighted) if value(y).dtype == value(x).dtype), weighted)
    between = (wide, *before, rsqrt, *casts, weighted)
    return Norm(x, weight, eps, output, between) if _is_one_kind(x, weight, output) else None


def _is_one_kind(x: Node, weight: Any, output: Node) -> bool:
    """Whether torch's norm takes these and gives what the graph does: contiguous rows of a known width."""
    if not all(map(is_plain, (x, weight, output))) or value(x).dim() == 0 or not isinstance(shape(x)[-1], int):
        return False
    same = len({(value(node).dtype, value(node).device) for node in (x, weight, output)}) == 1
    return same and shape(weight) == shape(x)[-1:] and value(output).is_contiguous()


def _mean_square(rsqrt: Node) -> tuple[Any, ...] | None:
    """``wide`` and ``eps`` of ``rsqrt(mean(wide^2, -1) + eps)`` in float32, and the nodes between."""
    total = arg(rsqrt, 0, "input")
    if op(total) != "add" or total.kwargs or not isinstance(total.args[1], float):
        return None
    mean = total.args[0]
    if op(mean) != "mean" or not arg(mean, 2, "keepdim", False):
        return None
    square, dim = arg(mean, 0, "input"), arg(mean, 1, "dim")
    dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    if not all(isinstance(x, int) for x in dims) or [normal_dim(square, x) for x in dims] != [normal_dim(square, -1)]:
        return None
    if op(square) != "pow" or square.kwargs or not is_scalar(square.args[1]) or square.args[1] != 2:
        return None
    wide = square.args[0]
    if not is_plain(wide) or not value(wide).dtype == value(rsqrt).dtype == torch.float32:
        return None
    return wide, total.args[1], square, mean, total


def _source(wide: Node) -> Node:
    """What was cast to float32, or ``wide`` itself."""
    source: Any = arg(wide, 0, "input") if op(wide) in CASTS else None
    if not is_plain(source) or value(source).device != value(wide).device:
        return wide
    return source if value(source).is_floating_point() else wide


def _cast(node: Node) -> list[Node]:
    """``node``, and casts of it one behind the other that each alone read the one before."""
    found = [node]
    while op(user := only_user(found[-1])) in CASTS and value(user).is_floating_point():
        if arg(user, 0, "input") is not found[-1]:  # type_as reads its dtype
            break
        found.append(user)
    return found
