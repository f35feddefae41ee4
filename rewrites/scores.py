"""Walk from the softmax up to q k^T and fold what lies between into scale, softcap, sinks and masks.

Walking up meets the last operation first, so ``factor`` holds what later operations multiply by:

    softmax(cap * tanh((q k^T * a) / cap) + mask)    mask: factor 1, softcap = factor at tanh, sm_scale = a
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attnpatch.axes import Dims
from attnpatch.errors import Refused
from attnpatch.graph import CASTS, arg, is_one, is_scalar, is_tensor, normal_dim, op, place, shape, value
from attnpatch.masking import is_excluding
from attnpatch.rewrites.expressions import Unknown, number
from attnpatch.rewrites.mask_terms import MaskReader
from attnpatch.rewrites.operands import RESHAPES, regroups
from attnpatch.rewrites.products import PRODUCTS, is_product, permutation
from attnpatch.rule import Operand


class Fold:
    """The state of one walk.

    Attributes:
        masks: reads every mask met on the way.
        dims: what the dimensions of the current node are.
        factor: what the value at the current node is still multiplied by.
        softcap: cap, once a tanh was passed.
        scales: tensors and SymFloats that scale the scores, with "mul" or "div".
        sinks: the node whose logits joined the scores, or a number that did.
        widened: whether the current node has the sinks as a column of its own.
        shifted: whether something constant along the keys was subtracted.
        interior: nodes passed.
    """

    def __init__(self, masks: MaskReader) -> None:
        self.masks = masks
        self.dims: Dims = ()
        self.factor = 1.0
        self.softcap: float | None = None
        self.scales: list[tuple[Operand, str]] = []
        self.sinks: Node | float | None = None
        self.widened = False
        self.shifted = False
        self.interior: list[Node] = []

    @property
    def sm_scale(self) -> float:
        """Constant factor on q.k, once the product is reached."""
        return self.factor * (self.softcap if self.softcap is not None else 1.0)

    @property
    def key_dim(self) -> int:
        """Which dimension of the current node the keys are."""
        if self.masks.layout.key not in self.dims:
            raise Refused("a view merges the keys of the scores with other dimensions")
        return self.dims.index(self.masks.layout.key)

    def constant(self, x: Any) -> float | None:
        """``x`` as a number if it is one: a Python number or ``torch.tensor(4.0)``."""
        if is_tensor(x) and len(shape(x)) > len(self.dims):
            return None
        try:
            return number(self.masks.element(x, self.dims))
        except Unknown:
            return None

    def along_keys(self, x: Node) -> bool:
        """Whether ``x``, broadcast to the current node, differs between keys."""
        at = self.key_dim - len(self.dims)
        return len(shape(x)) >= -at and not is_one(shape(x)[at])

    def walk(self, path: list[Node], dims: dict[Node, Dims]) -> None:
        """Fold the nodes of ``path``, from the softmax up, without the product at its end."""
        self.widened = any(op(node) == "cat" for node in path)
        for node in path[:-1]:
            self.dims, self.masks.pull.now = dims[node], node
            STEPS[op(node)](self, node)
        self.interior += path
        self.dims, self.masks.pull.now = dims[path[-1]], path[-1]


def trace(node: Node) -> list[Node]:
    """The nodes from ``node`` up to the product that makes the scores, both included."""
    path = [node]
    while not is_product(node):
        if op(node) not in STEPS:
            raise Refused(f"{op(node) or node.op} between q k^T and softmax is not understood ({place(node)})")
        node = _path_operand(node)
        path.append(node)
    return path


def leads_to_product(node: Any, depth: int = 24) -> bool:
    """Whether the path of the scores goes up through ``node``."""
    if is_product(node):
        return True
    if op(node) not in STEPS or depth == 0:
        return False
    return any(leads_to_product(x, depth - 1) for x in node.all_input_nodes)


def _path_operand(node: Node) -> Node:
    """The operand on the scores' path: the first that leads to a product."""
    if regroups(node) or permutation(node) is not None or op(node) in CASTS:
        return arg(node, 0, "input")
    inputs: dict[str, Any] = {"where": node.args[1:], "masked_fill": node.args[:1], "masked_fill_": node.args[:1]}
    for x in inputs.get(op(node), node.all_input_nodes):
        if is_tensor(x) and leads_to_product(x):
            return x
    why = "scores that are written part by part are not followed"
    raise Refused(f"{op(node)} at {place(node)} has no operand that comes from q k^T; {why}")


def _path_and_other(node: Node) -> tuple[Node, Any]:
    left, right = arg(node, 0, "input"), arg(node, 1, "other")
    path = _path_operand(node)
    if shape(path) != shape(node):
        raise Refused(f"{op(node)} at {place(node)} broadcasts the scores {list(shape(path))}")
    return path, right if path is left else left


def _keep(fold: Fold, node: Node) -> None:
    """A cast, a copy or a view."""
    if not value(node).is_floating_point():
        raise Refused(f"{op(node)} rounds the scores to {value(node).dtype} ({place(node)})")


def _scale(fold: Fold, node: Node) -> None:
    path, other = _path_and_other(node)
    divides = op(node) in ("div", "div_")
    if divides and path is not arg(node, 0, "input"):
        raise Refused(f"the scores are a divisor at {place(node)}")
    constant = fold.constant(other)
    if constant is not None and constant > 0:
        fold.factor = fold.factor / constant if divides else fold.factor * constant
    elif not divides and is_tensor(other) and fold.masks.is_one_where_visible(other, fold.dims):
        return  # GPT-1: scores * b - 1e9 * (1 - b)
    elif constant is None and (is_scalar(other) or (is_tensor(other) and not fold.along_keys(other))):
        fold.scales.append((fold.masks.for_rows(other, fold.dims), "div" if divides else "mul"))
    else:
        raise Refused(f"the scores are multiplied by {_said(other)} at {place(node)}, not by a positive number")


def _said(x: Any) -> str:
    return f"a tensor of shape {list(shape(x))}" if is_tensor(x) else repr(x)


def _tanh(fold: Fold, node: Node) -> None:
    if fold.softcap is not None:
        raise Refused(f"two tanh between q k^T and softmax ({place(node)})")
    if fold.scales:
        raise Refused(f"the softcap is known only at run time ({place(node)})")
    fold.softcap, fold.factor = fold.factor, 1.0


def _refuse_early_mask(fold: Fold, node: Node) -> None:
    """A mask can only be the last thing that happens to the scores, constant factors apart."""
    if fold.widened:
        raise Refused(f"a mask is applied to the scores and the sinks together ({place(node)})")
    if fold.softcap is not None:
        raise Refused(f"a mask is applied before the softcap ({place(node)})")
    if fold.scales:
        raise Refused(f"a mask is applied before a scale that is known only at run time ({place(node)})")


def _add(fold: Fold, node: Node) -> None:
    path, mask = _path_and_other(node)
    alpha = arg(node, 2, "alpha", 1)
    if alpha != 1 and path is not arg(node, 0, "input"):
        raise Refused(f"{op(node)}(alpha={alpha}) at {place(node)} scales the scores")
    fold_bias(fold, node, mask, fold.factor * alpha)


def fold_bias(fold: Fold, node: Node, mask: Any, factor: float) -> None:
    """``scores + factor * mask`` at ``node``."""
    if is_tensor(mask):
        _refuse_early_mask(fold, node)
        fold.masks.add(mask, "additive", factor, fold.dims)


def _sub(fold: Fold, node: Node) -> None:
    """Subtract what is the same for every key of a row, which softmax does not see, or a bias."""
    path, other = _path_and_other(node)
    if path is not arg(node, 0, "input"):
        raise Refused(f"the scores are subtracted at {place(node)}")
    if not is_tensor(other) or fold.along_keys(other):
        return fold_bias(fold, node, other, -fold.factor * arg(node, 2, "alpha", 1))
    if fold.softcap is not None:
        raise Refused(f"the scores are shifted before the softcap ({place(node)})")
    if fold.sinks is not None:
        raise Refused(f"the scores are shifted, and the sinks are not ({place(node)})")
    fold.shifted = True
    fold.interior += _made_from(other, path)
    return None


def _made_from(other: Node, path: Node) -> list[Node]:
    """The nodes by which ``other`` is the maximum of ``path``."""
    nodes: list[Node] = []
    while is_tensor(other) or op(other) == "max":
        if other is path:
            return nodes
        nodes.append(other)
        if op(other) not in ("getitem", "max", "amax", "detach", "getattr", "unsqueeze"):
            break
        other = arg(other, 0, "input")
    return []


def _masked_fill(fold: Fold, node: Node) -> None:
    path, mask, fill = arg(node, 0, "input"), arg(node, 1, "mask"), arg(node, 2, "value")
    _exclude(fold, node, path, mask, fill, "hide")


def _where(fold: Fold, node: Node) -> None:
    condition, then, otherwise = (arg(node, i, n) for i, n in enumerate(("condition", "input", "other")))
    if leads_to_product(then):
        return _exclude(fold, node, then, condition, otherwise, "keep")
    return _exclude(fold, node, otherwise, condition, then, "hide")


def _exclude(fold: Fold, node: Node, path: Any, mask: Node, fill: Any, kind: str) -> None:
    """Scores replaced by a constant that excludes."""
    constant = fold.constant(fill)
    if not is_tensor(path) or shape(path) != shape(node):
        raise Refused(f"{op(node)} at {place(node)} broadcasts the scores")
    if constant is None or not is_excluding(constant, fold.factor):
        raise Refused(f"hidden scores become {_said(fill)} at {place(node)}, which does not exclude them")
    _refuse_early_mask(fold, node)
    fold.masks.add(mask, kind, 1.0, fold.dims)


def _at_least(fold: Fold, node: Node) -> None:
    """``max(scores, finfo.min)``: a floor that only excluded keys are below."""
    floor = arg(node, 1, "min") if op(node) in ("clamp", "clamp_min", "clip") else _path_and_other(node)[1]
    ceiling = arg(node, 2, "max") if op(node) in ("clamp", "clip") else None
    constant = fold.constant(floor) if floor is not None else None
    if constant is None or not is_excluding(constant) or ceiling is not None:
        raise Refused(f"{op(node)} at {place(node)} changes scores of visible keys")


def _cat(fold: Fold, node: Node) -> None:
    """One more logit per head, as a column of its own."""
    path, tensors = _path_operand(node), arg(node, 0, "tensors")
    others = [x for x in tensors if x is not path]
    on_keys = normal_dim(node, arg(node, 1, "dim", 0)) == fold.key_dim
    if len(others) != 1 or tensors[0] is not path or not on_keys or not is_one(shape(others[0])[fold.key_dim]):
        raise Refused(f"the scores are concatenated with others at {place(node)}")
    if fold.sinks is not None or fold.softcap is not None or fold.factor != 1.0 or fold.scales:
        raise Refused(f"the sinks that join the scores at {place(node)} are scaled")
    fold.sinks, fold.widened = fold.masks.per_head(others[0], fold.dims), False


def drops_sink(node: Node, key_dim: int) -> bool:
    """Whether ``node`` is its input without the last column."""
    if op(node) == "narrow":
        length = int(shape(arg(node, 0, "input"))[key_dim])
        on_keys = normal_dim(node, arg(node, 1, "dim")) == key_dim
        return on_keys and arg(node, 2, "start") == 0 and bool(shape(node)[key_dim] == length - 1)
    if op(node) != "getitem" or not isinstance(node.args[1], tuple):
        return False
    items = [i for i in node.args[1] if i is not Ellipsis]
    last = key_dim == len(shape(node)) - 1 and (Ellipsis in node.args[1] or len(items) == len(shape(node)))
    whole = all(isinstance(i, slice) and i == slice(None) for i in items[:-1])
    return last and whole and isinstance(items[-1], slice) and items[-1] in (slice(None, -1), slice(0, -1))


STEPS: dict[str, Callable[[Fold, Node], None]] = {
    **dict.fromkeys((*CASTS, *RESHAPES, "getitem", "transpose", "permute", "movedim", "mT"), _keep),
    **dict.fromkeys(("mul", "mul_", "div", "div_"), _scale),
    **dict.fromkeys(("add", "add_"), _add),
    **dict.fromkeys(("sub", "sub_"), _sub),
    "tanh": _tanh,
    **dict.fromkeys(("masked_fill", "masked_fill_"), _masked_fill),
    "where": _where,
    **dict.fromkeys(("max", "maximum", "clamp", "clamp_min", "clip"), _at_least),
    "cat": _cat,
}
"""What may stand between q k^T and softmax. A new step is one function and one line here."""


_PRODUCERS = ("linear", "embedding", "layer_norm", "softmax", "conv1d", "conv2d", *PRODUCTS)


def ancestors(node: Node, limit: int = 160) -> Iterator[Node]:
    """Nodes above ``node``, nearest first, stopping at producers of features, but not where these mix scores."""
    seen, pending = {node}, list(node.all_input_nodes)
    while pending and len(seen) < limit:
        x = pending.pop(0)
        if x in seen:
            continue
        seen.add(x)
        yield x
        pending.extend(y for user in x.users if op(user) == "setitem" for y in user.all_input_nodes)
        mixes = (
            is_tensor(x) and same_size(x, node) and any(is_tensor(y) and same_size(y, node) for y in x.all_input_nodes)
        )
        if op(x) not in _PRODUCERS or mixes:
            pending.extend(x.all_input_nodes)


def same_size(x: Node, y: Node) -> bool:
    """Whether two tensors hold equally many elements, as far as is known."""
    return bool(statically_known_true(value(x).numel() == value(y).numel()))
