"""Products of tensors and reorderings of dimensions, in any spelling, as letters: ``bhid, bhjd -> bhij``."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.fx import Node

from attnpatch.errors import Refused
from attnpatch.graph import arg, is_one, is_tensor, normal_dim, op, place, shape, varargs

PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")


class Product(NamedTuple):
    """``out = alpha * sum(left * right) + beta * bias``, a letter per dimension ("" where it broadcasts)."""

    left: Node
    right: Node
    left_letters: tuple[str, ...]
    right_letters: tuple[str, ...]
    out_letters: tuple[str, ...]
    alpha: Any = 1
    beta: Any = 1
    bias: Any = None

    def letters(self, operand: Node) -> tuple[str, ...]:
        """The letters of one operand."""
        return self.left_letters if operand is self.left else self.right_letters


def is_product(node: Any) -> bool:
    """Whether ``node`` multiplies two tensors of 3 or more dimensions (einsum: 2 where it has another letter)."""
    if op(node) not in PRODUCTS or not is_tensor(node):
        return False
    operands = einsum_operands(node)[1] if op(node) == "einsum" else _factors(node)
    return len(operands) == 2 and all(is_tensor(x) and len(shape(x)) >= 2 for x in operands) and len(shape(node)) >= 3


def multiplies(node: Any) -> bool:
    """Whether ``node`` multiplies tensors that have a batch, so that it may be a product of attention."""
    if op(node) not in PRODUCTS or not is_tensor(node):
        return False
    operands = einsum_operands(node)[1] if op(node) == "einsum" else _factors(node)
    return sum(is_tensor(x) and len(shape(x)) >= 3 for x in operands) >= 2


def read_product(node: Node) -> Product:
    """The product at ``node``.

    Raises:
        Refused: letters repeat in one operand, or an operand is summed alone.
    """
    if op(node) == "einsum":
        return _einsum(node)
    left, right = _factors(node)
    product = Product(left, right, *_matmul_letters(shape(left), shape(right)))
    if op(node) != "baddbmm":
        return product
    alpha, beta = arg(node, 4, "alpha", 1), arg(node, 3, "beta", 1)
    bias = None if isinstance(beta, (int, float)) and beta == 0 else arg(node, 0, "input")
    return product._replace(alpha=alpha, beta=beta, bias=bias)


def _factors(node: Node) -> tuple[Any, Any]:
    if op(node) == "baddbmm":
        return arg(node, 1, "batch1"), arg(node, 2, "batch2")
    return arg(node, 0, "input"), arg(node, 1, "mat2" if "mat2" in node.kwargs else "other")


def _matmul_letters(
    left: Sequence[Any], right: Sequence[Any]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Letters of ``[..., m, c] @ [..., c, n]``; leading dimensions align from the right."""
    rank = max(len(left), len(right)) - 2
    batch = string.ascii_lowercase[:rank]
    left_batch, right_batch = (batch[rank - len(x) + 2 :] for x in (left, right))
    named = [
        "" if is_one(mine) and not is_one(theirs) else letter
        for letter, mine, theirs in _aligned(left_batch, left, right)
    ]
    other = [
        "" if is_one(mine) and not is_one(theirs) else letter
        for letter, mine, theirs in _aligned(right_batch, right, left)
    ]
    return (*named, "Y", "C"), (*other, "C", "Z"), (*batch, "Y", "Z")


def _aligned(letters: str, mine: Sequence[Any], theirs: Sequence[Any]) -> list[tuple[str, Any, Any]]:
    """Letter and both sizes of each leading dimension of ``mine``; one that ``theirs`` lacks is like its own."""
    sizes = list(mine)[:-2]
    other = ([None] * len(sizes) + list(theirs)[:-2])[-len(sizes) :] if sizes else []
    return [(a, m, m if t is None else t) for a, m, t in zip(letters, sizes, other, strict=True)]


def einsum_operands(node: Node) -> tuple[str, list[Any]]:
    """Equation and operands; the operands may come as one list."""
    equation = node.args[0] if node.args else None
    return (equation, varargs(node, 1, "operands")) if isinstance(equation, str) else ("", [])


def _einsum(node: Node) -> Product:
    equation, (left, right) = einsum_operands(node)
    inputs, _, out = equation.replace(" ", "").partition("->")
    if not out:
        raise Refused(f"einsum {equation!r} leaves its output to a convention ({place(node)})")
    a, b = inputs.split(",")
    letters = [_spelled(text, x) for text, x in ((a, left), (b, right), (out, node))]
    for text in letters:
        if len(set(text)) != len(text):
            raise Refused(f"einsum {equation!r} takes a diagonal ({place(node)})")
    if any(x not in {*letters[1 - i], *letters[2]} for i in (0, 1) for x in letters[i]):
        raise Refused(f"einsum {equation!r} sums an operand on its own ({place(node)})")
    return Product(left, right, *letters)


def _spelled(text: str, x: Node) -> tuple[str, ...]:
    """One name per dimension; an ellipsis stands for dimensions counted from the right."""
    if "..." not in text:
        return tuple(text)
    before, after = text.split("...")
    hidden = len(shape(x)) - len(before) - len(after)
    return (*before, *(f".{i}" for i in range(hidden, 0, -1)), *after)


def permutation(node: Node) -> list[int] | None:
    """For a node that only reorders dimensions: dimension i of it is dimension ``order[i]`` of its input."""
    rank = len(shape(node)) if is_tensor(node) else 0
    order = list(range(rank))
    if op(node) in ("mT", "T", "t") or (op(node) == "getattr" and arg(node, 1, "other") in ("mT", "T")):
        return [*order[:-2], *reversed(order[-2:])] if rank == 2 or arg(node, 1, "other", op(node)) == "mT" else None
    if op(node) == "transpose":
        a, b = (normal_dim(node, arg(node, i, f"dim{i - 1}")) for i in (1, 2))
        order[a], order[b] = order[b], order[a]
        return order
    if op(node) == "permute":
        return [d % rank for d in varargs(node, 1, "dims")]
    if op(node) in ("movedim", "moveaxis"):
        return _moved(node, order)
    return None


def _moved(node: Node, order: list[int]) -> list[int] | None:
    source, target = arg(node, 1, "source"), arg(node, 2, "destination")
    if not isinstance(source, int) or not isinstance(target, int):
        return None
    source, target = normal_dim(node, source), normal_dim(node, target)
    order.insert(target, order.pop(source))
    return order
