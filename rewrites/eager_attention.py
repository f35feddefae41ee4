"""Attention written out.

before   s = matmul(q, k.transpose(-1, -2)); s = s * scale; s = softcap(s); s = s + mask
         p = dropout(softmax(s)); o = matmul(p, v)
after    o = attnpatch::attention(q, k, v, scale, mask terms)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import Graph, Node

from attnpatch.errors import Refused
from attnpatch.graph import CASTS, Writes, arg, is_tensor, normal_dim, op, place, shape
from attnpatch.rewrites.mask_terms import MaskReader
from attnpatch.rewrites.operands import check_shapes, peel, read, transposed, unrepeated
from attnpatch.rewrites.scores import PRODUCTS, Fold, ancestors
from attnpatch.rule import Rule, Site

_ANY_PRODUCT = (*PRODUCTS, "baddbmm", "einsum")


def candidates(graph: Graph) -> Iterator[Node]:
    """Softmaxes between two products of tensors with 3 or more dimensions; routers and poolers are not."""
    for node in graph.nodes:
        if op(node) == "softmax" and is_tensor(node) and _product_above(node) and _product_below(node):
            yield node


def _product_above(node: Node) -> bool:
    return any(op(x) in _ANY_PRODUCT and _batched(x) for x in ancestors(node))


def _batched(product: Node) -> bool:
    tensors = [x for x in product.all_input_nodes if is_tensor(x)]
    return all(len(shape(x)) >= 3 for x in tensors)


_CARRIERS = frozenset(CASTS) | frozenset(
    [
        "dropout",
        "view",
        "reshape",
        "getitem",
        "transpose",
        "permute",
        "flatten",
        "expand",
        "unsqueeze",
        "squeeze",
        "cat",
        "mul",
        "mul_",
        "div",
        "div_",
        "add",
        "add_",
        "sub",
        "sub_",
        "masked_fill",
        "masked_fill_",
        "where",
        "tril",
        "triu",
        "nan_to_num",
    ]
)
"""What may stand between a softmax and its product for the site to be reported, most often as refused."""


def _product_below(node: Node, depth: int = 8) -> bool:
    for user in node.users:
        if op(user) in _ANY_PRODUCT:
            return op(user) in ("einsum", "baddbmm") or arg(user, 0, "input") is node
        if depth and op(user) in _CARRIERS and _product_below(user, depth - 1):
            return True
    return False


def match(softmax: Node, writes: Writes) -> Site:
    """The site around ``softmax``."""
    below, anchor = _to_value_product(softmax)
    rank = len(shape(softmax))
    if normal_dim(softmax, arg(softmax, 1, "dim")) != rank - 1:
        raise Refused(f"softmax is over dim {arg(softmax, 1, 'dim')}, not over the keys ({place(softmax)})")
    fold = Fold(MaskReader(rank, (shape(softmax)[-2], shape(softmax)[-1]), writes))
    product = fold.walk(arg(softmax, 0, "input"))
    _check_readers(fold.interior, {*fold.interior, softmax, *below}, "scores")  # below: type_as(scores)
    k_transposed = _unscaled(arg(product, 1, "other"), fold)
    k = transposed(k_transposed)
    q, v = peel(arg(product, 0, "input")), arg(anchor, 1, "other")
    if k is not None:
        k, v = unrepeated(k, v)
    check_shapes(q, shape(k) if k else _swapped(shape(k_transposed)), v, k or k_transposed, product, anchor)
    k_read = k or k_transposed
    reads = [read(q, arg(product, 0, "input"), product), read(k_read, arg(product, 1, "other"), product)]
    reads += [read(v, arg(anchor, 1, "other"), anchor), *((t, product) for t, _ in fold.symbolic if is_tensor(t))]
    return Site(
        anchor, q, k_read, v, fold.sm_scale, fold.masks.terms(), fold.softcap, k is None,
        fold.symbolic, fold.masks.pull.readers, [*fold.interior, softmax, *below], reads,
    )  # fmt: skip


def _swapped(size: Sequence[Any]) -> list[Any]:
    return [*size[:-2], size[-1], size[-2]]


def _unscaled(node: Node, fold: Fold) -> Node:
    """k^T without a constant factor, which moves to the fold."""
    while op(node) in ("mul", "div") and is_tensor(arg(node, 0, "input")):
        constant = fold.constant(arg(node, 1, "other"))
        if constant is None:
            break
        fold.factor *= constant if op(node) == "mul" else 1 / constant
        node = arg(node, 0, "input")
    return node


def _to_value_product(softmax: Node) -> tuple[list[Node], Node]:
    """The nodes between softmax and ``p @ v``, and that product."""
    passed: list[Node] = []
    node = softmax
    while True:
        user = _only_reader(node)
        if op(user) in PRODUCTS and arg(user, 0, "input") is node:
            return passed, user
        if op(user) == "dropout":
            _check_dropout(user)
        elif op(user) not in CASTS:
            raise Refused(f"{op(user) or user.op} reads the attention probabilities ({place(user)})")
        passed.append(user)
        node = user


def _only_reader(node: Node) -> Node:
    readers = list(node.users)
    if len(readers) == 1:
        return readers[0]
    others = [r for r in readers if not _product_below_or_is(r)] or readers[1:]
    raise Refused(f"the attention probabilities are also read by {_reader(others[0])}")


def _product_below_or_is(node: Node) -> bool:
    return op(node) in _ANY_PRODUCT or _product_below(node)


def _reader(node: Node) -> str:
    if node.op == "output":
        return "the caller: they are returned (output_attentions)"
    return f"{op(node)} ({place(node)})"


def _check_dropout(node: Node) -> None:
    p, training = arg(node, 1, "p", 0.5), arg(node, 2, "training", node.kwargs.get("train", True))
    if p > 0 and training:
        raise Refused(f"dropout with p={p} is active in training; fused attention has none")


def _check_readers(nodes: list[Node], inside: set[Node], what: str) -> None:
    for node in nodes:
        for user in node.users:
            if user not in inside:
                raise Refused(f"the {what} are also read by {_reader(user)}; returning them needs their memory")


RULE = Rule("eager_attention", candidates, match)
