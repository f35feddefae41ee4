"""Softmax in every spelling.

softmax(x, dim)                                torch.softmax, F.softmax, Tensor.softmax
exp(log_softmax(x, dim)),  exp(x - logsumexp(x, dim, keepdim=True))
e = exp(x);  e / e.sum(dim, keepdim=True)      most often of x minus its maximum
e / (e.sum(dim, keepdim=True) + c)             one more logit, log c, that has no value
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch.fx import Node

from attnpatch.graph import arg, is_tensor, normal_dim, op, shape


class Softmax(NamedTuple):
    """A softmax.

    Args:
        node: the probabilities.
        scores: what softmax is taken of.
        dim: the dimension it sums over.
        said_dim: how the graph says it.
        interior: nodes between ``scores`` and ``node``.
        denominator: log of a number that is added to the sum, or None.
    """

    node: Node
    scores: Node
    dim: int
    said_dim: Any
    interior: tuple[Node, ...] = ()
    denominator: float | None = None


OTHERS = ("gumbel_softmax", "softmin", "sparsemax", "entmax15")
"""What weighs keys like softmax and is another function."""


def is_softmax(node: Node) -> bool:
    """Whether ``node`` holds probabilities: a softmax, or another function to their end."""
    return op(node) in OTHERS or read_softmax(node) is not None or _is_unfinished(node)


def _is_unfinished(node: Node) -> bool:
    """Exponentials that are summed, and divided by something else than their sum, or only after the product."""
    if op(node) == "div" and op(arg(node, 0, "input")) == "exp":
        summed = any(op(x) == "sum" for x in arg(node, 0, "input").users)
        return summed or op(arg(node, 1, "other")) in ("sum", "add")
    if op(node) == "log_softmax":
        return all(op(x) != "exp" for x in node.users)
    readers = {op(x) for x in node.users} if op(node) == "exp" else set()
    return "sum" in readers and not readers & {"div", "div_"}


def read_softmax(node: Node) -> Softmax | None:
    """The softmax whose probabilities ``node`` holds, or None."""
    if op(node) == "softmax":
        return _over(node, node, (), arg(node, 1, "dim"))
    if op(node) == "exp" and op(arg(node, 0, "input")) == "log_softmax":
        inner = arg(node, 0, "input")
        return _over(node, inner, (inner,), arg(inner, 1, "dim"))
    if op(node) == "exp" and op(arg(node, 0, "input")) == "sub":
        return _less_logsumexp(node, arg(node, 0, "input"))
    if op(node) in ("div", "div_"):
        return _written_out(node)
    return None


def _less_logsumexp(node: Node, difference: Node) -> Softmax | None:
    """``exp(x - logsumexp(x, dim, keepdim=True))``."""
    scores, total = arg(difference, 0, "input"), arg(difference, 1, "other")
    if op(total) != "logsumexp" or arg(total, 0, "input") is not scores or not arg(total, 2, "keepdim", False):
        return None
    found = _over(node, total, (difference, total), _one(arg(total, 1, "dim")))
    return found if found is not None and isinstance(found.said_dim, int) else None


def _one(dim: Any) -> Any:
    return dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim


def _over(node: Node, inner: Node, interior: tuple[Node, ...], dim: Any, added: float | None = None) -> Softmax | None:
    scores = arg(inner, 0, "input")
    if not is_tensor(scores):
        return None
    if dim is None:  # what torch chooses
        dim = 0 if len(shape(scores)) in (0, 1, 3) else 1
    return Softmax(node, scores, normal_dim(scores, dim), dim, interior, added)


def _written_out(node: Node) -> Softmax | None:
    """``e / (e.sum(dim, keepdim=True) + c)`` with ``e = exp(x)``."""
    exponential, total = arg(node, 0, "input"), arg(node, 1, "other")
    constant, interior = 0.0, [exponential, total]
    if op(total) == "add":
        left, right = arg(total, 0, "input"), arg(total, 1, "other")
        total, constant = (right, left) if isinstance(left, (int, float)) else (left, right)
        interior.append(total)
    if op(exponential) != "exp" or op(total) != "sum" or arg(total, 0, "input") is not exponential:
        return None
    dim, keepdim = _one(arg(total, 1, "dim", total.kwargs.get("axis"))), arg(total, 2, "keepdim", False)
    if not keepdim or not isinstance(dim, int) or not isinstance(constant, (int, float)) or constant < 0:
        return None
    return _over(node, exponential, tuple(interior), dim, math.log(constant) if constant else None)
