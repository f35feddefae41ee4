"""Walk from the softmax up to q k^T and fold what lies between into scale, softcap and masks.

Walking up meets the last operation first, so ``factor`` holds what later operations multiply by:

    softmax(cap * tanh((q k^T * a) / cap) + mask)    mask: factor 1, softcap = factor at tanh, sm_scale = a
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Node

from attnpatch.errors import Refused
from attnpatch.graph import CASTS, arg, is_scalar, is_tensor, op, place, shape, value
from attnpatch.masking import is_excluding
from attnpatch.rewrites.expressions import Unknown, number
from attnpatch.rewrites.mask_terms import MaskReader
from attnpatch.rewrites.pullback import broadcast

PRODUCTS = ("matmul", "bmm")


class Fold:
    """The state of one walk.

    Attributes:
        masks: reads every mask met on the way.
        factor: what the value at the current node is still multiplied by.
        softcap: cap, once a tanh was passed.
        symbolic: a SymFloat or 0-d tensor node that scales the scores, with "mul" or "div".
        interior: nodes passed.
    """

    def __init__(self, masks: MaskReader) -> None:
        self.masks = masks
        self.factor = 1.0
        self.softcap: float | None = None
        self.symbolic: list[tuple[Node, str]] = []
        self.interior: list[Node] = []

    @property
    def sm_scale(self) -> float:
        """Constant factor on q.k, once the product is reached."""
        return self.factor * (self.softcap if self.softcap is not None else 1.0)

    def constant(self, x: Any) -> float | None:
        """``x`` as a number if it is one: a Python number or ``torch.tensor(4.0)``."""
        if is_tensor(x) and len(shape(x)) > len(self.masks.indices):
            return None
        try:
            return number(self.masks.pull.element(x, broadcast(self.masks.indices, x) if is_tensor(x) else ()))
        except Unknown:
            return None

    def walk(self, node: Node) -> Node:
        """Fold from ``node`` up to the product and return the product."""
        while op(node) not in PRODUCTS:
            step = STEPS.get(op(node))
            if step is None:
                raise Refused(f"{op(node) or node.op} between q k^T and softmax is not understood ({place(node)})")
            self.interior.append(node)
            node = step(self, node)
        self.interior.append(node)
        return node


def leads_to_product(node: Any, depth: int = 24) -> bool:
    """Whether the path of the scores goes up through ``node``."""
    if op(node) in PRODUCTS:
        return True
    if op(node) not in STEPS or depth == 0:
        return False
    return any(leads_to_product(x, depth - 1) for x in node.all_input_nodes)


def _path_and_other(node: Node) -> tuple[Node, Any]:
    """The operand on the scores' path, and the other one."""
    left, right = arg(node, 0, "input"), arg(node, 1, "other")
    path, other = (left, right) if leads_to_product(left) else (right, left)
    if not is_tensor(path) or not leads_to_product(path):
        raise Refused(f"{op(node)} at {place(node)} has no operand that comes from q k^T")
    if shape(path) != shape(node):
        raise Refused(f"{op(node)} at {place(node)} broadcasts the scores {list(shape(path))}")
    return path, other


def _cast(fold: Fold, node: Node) -> Node:
    return arg(node, 0, "input")


def _scale(fold: Fold, node: Node) -> Node:
    path, other = _path_and_other(node)
    divides = op(node) in ("div", "div_")
    if divides and path is not arg(node, 0, "input"):
        raise Refused(f"the scores are a divisor at {place(node)}")
    constant = fold.constant(other)
    if constant is not None and constant > 0:
        fold.factor = fold.factor / constant if divides else fold.factor * constant
    elif constant is None and (is_scalar(other) or (is_tensor(other) and value(other).numel() == 1)):
        fold.symbolic.append((other, "div" if divides else "mul"))
    else:
        raise Refused(f"the scores are multiplied by {_said(other)} at {place(node)}, not by a positive number")
    return path


def _said(x: Any) -> str:
    return f"a tensor of shape {list(shape(x))}" if is_tensor(x) else repr(x)


def _tanh(fold: Fold, node: Node) -> Node:
    if fold.softcap is not None:
        raise Refused(f"two tanh between q k^T and softmax ({place(node)})")
    if fold.symbolic:
        raise Refused(f"the softcap is known only at run time ({place(node)})")
    fold.softcap, fold.factor = fold.factor, 1.0
    return arg(node, 0, "input")


def _refuse_early_mask(fold: Fold, node: Node) -> None:
    """A mask can only be the last thing that happens to the scores, constant factors apart."""
    if fold.softcap is not None:
        raise Refused(f"a mask is applied before the softcap ({place(node)})")
    if fold.symbolic:
        raise Refused(f"a mask is applied before a scale that is known only at run time ({place(node)})")


def _add(fold: Fold, node: Node) -> Node:
    path, mask = _path_and_other(node)
    factor = fold.factor
    if arg(node, 2, "alpha", 1) != 1:
        raise Refused(f"add(alpha={arg(node, 2, 'alpha')}) at {place(node)} is not folded")
    if is_tensor(mask):
        _refuse_early_mask(fold, node)
        fold.masks.add(mask, "additive", factor)
    return path


def _masked_fill(fold: Fold, node: Node) -> Node:
    path, mask, fill = arg(node, 0, "input"), arg(node, 1, "mask"), arg(node, 2, "value")
    return _exclude(fold, node, path, mask, fill, "hide")


def _where(fold: Fold, node: Node) -> Node:
    condition, then, otherwise = (arg(node, i, n) for i, n in enumerate(("condition", "input", "other")))
    if leads_to_product(then):
        return _exclude(fold, node, then, condition, otherwise, "keep")
    return _exclude(fold, node, otherwise, condition, then, "hide")


def _exclude(fold: Fold, node: Node, path: Any, mask: Node, fill: Any, kind: str) -> Node:
    """Scores replaced by a constant that excludes."""
    constant = fold.constant(fill)
    if not is_tensor(path) or shape(path) != shape(node):
        raise Refused(f"{op(node)} at {place(node)} broadcasts the scores")
    if constant is None or not is_excluding(constant):
        raise Refused(f"hidden scores become {_said(fill)} at {place(node)}, which does not exclude them")
    _refuse_early_mask(fold, node)
    fold.masks.add(mask, kind)
    return path


STEPS: dict[str, Callable[[Fold, Node], Node]] = {
    **dict.fromkeys(CASTS, _cast),
    **dict.fromkeys(("mul", "mul_", "div", "div_"), _scale),
    "add": _add,
    "add_": _add,
    "tanh": _tanh,
    "masked_fill": _masked_fill,
    "masked_fill_": _masked_fill,
    "where": _where,
}
"""What may stand between q k^T and softmax. A new step is one function and one line here."""


def ancestors(node: Node, limit: int = 48) -> Iterator[Node]:
    """Nodes above ``node``, nearest first, stopping at producers of features (linear, embedding, norms)."""
    seen, pending = {node}, list(node.all_input_nodes)
    while pending and len(seen) < limit:
        x = pending.pop(0)
        if x in seen:
            continue
        seen.add(x)
        yield x
        if op(x) not in (
            "linear",
            "embedding",
            "layer_norm",
            "softmax",
            "conv2d",
            *PRODUCTS,
            "baddbmm",
            "einsum",
        ):
            pending.extend(x.all_input_nodes)
