"""Elements of what is computed: arithmetic, comparisons, logic, casts, filled tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from attnpatch.affine import Affine, scalar_affine
from attnpatch.graph import CASTS, arg, op, value
from attnpatch.rewrites.expressions import (
    BOOLEAN,
    INTEGER,
    And,
    AtLeastZero,
    Const,
    Equal,
    FloorDiv,
    Load,
    Magnitude,
    Not,
    Sloped,
    Sum,
    Unknown,
    Where,
    as_condition,
    conjunction,
    disjunction,
    integer,
    leafwise,
    negation,
    number,
    survives_cast,
)

if TYPE_CHECKING:
    from attnpatch.rewrites.pullback import Pullback


def _operands(pull: Pullback, node: Node, indices: tuple[Affine, ...], *names: str) -> list[Any]:
    return [pull.operand(node, arg(node, i, name), indices) for i, name in enumerate(names)]


def _binary(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> list[Any]:
    return _operands(pull, node, indices, "input", "other")


def _add(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    left, right = _binary(pull, node, indices)
    if arg(node, 2, "alpha", 1) != 1:
        raise Unknown(node)
    if isinstance(integer(left), Affine) and isinstance(integer(right), Affine):
        return integer(left) + integer(right)
    return Sum(left, right)


def _sub(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    left, right = _binary(pull, node, indices)
    if isinstance(integer(left), Affine) and isinstance(integer(right), Affine):
        return integer(left) - integer(right)
    minuend, subtrahend = number(left), number(right)
    if value(node).dtype == torch.uint8:  # wraps below zero
        raise Unknown(node)
    if minuend is not None:
        return leafwise(right, lambda x: minuend - x)
    if subtrahend is not None:
        return leafwise(left, lambda x: x - subtrahend)
    return _difference_of_few(left, right)


def _difference_of_few(left: Any, right: Any) -> Any:
    """``left - right`` of values that are one of few constants each: the difference of two triangles is a band."""
    if isinstance(left, Where):
        then, otherwise = (_difference_of_few(x, right) for x in (left.then, left.otherwise))
        return Where(left.condition, then, otherwise)
    constant = number(left)
    if constant is None:
        raise Unknown(left)
    return leafwise(right, lambda x: constant - x)


def _mul(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    left, right = _binary(pull, node, indices)
    if number(left) is not None:
        left, right = right, left
    if isinstance(left, Affine) and isinstance(right, Affine) and right.is_constant:
        return left * right.constant
    if isinstance(left, (*BOOLEAN, Load)) and isinstance(right, (*BOOLEAN, Load)) and _is_bool(node):
        return conjunction(left, right)
    factor = number(right)
    if factor is None:
        return _sloped(node, left, right)
    if isinstance(left, (Sloped, Magnitude)):
        return _scaled(left, factor)
    return leafwise(left, lambda x: x * factor)


def _sloped(node: Node, left: Any, right: Any) -> Any:
    """A tensor's element times a distance."""
    slope, distance = (left, right) if isinstance(left, Load) else (right, left)
    sign = 1.0
    if isinstance(distance, Sloped) and distance.slope is None:
        distance, sign = distance.distance, distance.factor
    if isinstance(slope, Load) and isinstance(distance, INTEGER) and value(slope.node).is_floating_point():
        return Sloped(slope, distance, sign)
    raise Unknown(node)


def _scaled(x: Any, factor: float) -> Any:
    """``x * factor`` of a distance, or of one with a slope."""
    return replace(x, factor=x.factor * factor) if isinstance(x, Sloped) else Sloped(None, x, factor)


def _neg(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    x = pull.operand(node, arg(node, 0, "input"), indices)
    if isinstance(x, (Sloped, Magnitude)):
        return _scaled(x, -1.0)
    return -x if isinstance(x, Affine) else leafwise(x, lambda value: -value)


def _is_bool(node: Node) -> bool:
    return value(node).dtype == torch.bool


def _difference(node: Node, left: Any, right: Any) -> Affine:
    """``left - right`` of integer expressions."""
    if isinstance(left, Affine) and isinstance(right, Affine):
        return left - right
    raise Unknown(node)


def _at_least(node: Node, left: Any, right: Any, slack: int) -> Any:
    """``left >= right + slack`` for integers, magnitudes included."""
    if isinstance(right, Magnitude) and isinstance(left, Affine):  # |d| <= w: both sides
        d = right.expression
        return And(AtLeastZero(left - d - slack), AtLeastZero(left + d - slack))
    if isinstance(left, Magnitude) and isinstance(right, Affine):
        return Not(_at_least(node, right, left, 1 - slack))
    return AtLeastZero(_difference(node, left, right) - slack)


def _comparison(holds: Callable[[float, float], bool], swap: bool, slack: int) -> Callable[..., Any]:
    def compare(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
        for operands in (_binary, _seen_whole):
            left, right = (integer(x) for x in operands(pull, node, indices))
            if isinstance(left, INTEGER) and isinstance(right, INTEGER):
                return _at_least(node, right, left, slack) if swap else _at_least(node, left, right, slack)
            if operands is _binary and (number(left) is not None or number(right) is not None):
                try:
                    return _compared(holds, left, right)
                except Unknown:
                    continue
        raise Unknown(node)

    return compare


def _seen_whole(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> list[Any]:
    """The operands as elements of the tensors that hold them, however those are made."""
    pull.views_only = True
    try:
        return _binary(pull, node, indices)
    finally:
        pull.views_only = False


def _compared(holds: Callable[[float, float], bool], left: Any, right: Any) -> Any:
    """A comparison of a value that is one of few constants with a constant."""
    threshold, constant = number(right), number(left)
    if threshold is not None:
        return as_condition(leafwise(left, lambda x: holds(x, threshold)))
    if constant is not None:
        return as_condition(leafwise(right, lambda x: holds(constant, x)))
    raise Unknown(right)


def _ne(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    left, right = _binary(pull, node, indices)
    if number(right) == 0:
        return as_condition(left)
    return _compared(operator.ne, left, right)


def _eq(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    left, right = _binary(pull, node, indices)
    if number(right) == 0:
        return negation(as_condition(left))
    if isinstance(left, FloorDiv) and isinstance(right, FloorDiv):
        return Equal(left, right)
    return _elements_of_one(pull, node, indices) or _compared(operator.eq, left, right)


def _elements_of_one(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Equal | None:
    """Two elements of one tensor, however that is made."""
    left, right = _seen_whole(pull, node, indices)
    one = isinstance(left, Load) and isinstance(right, Load) and left.node is right.node
    return Equal(left, right) if one else None


def _floor_divide(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    left, divisor = _binary(pull, node, indices)
    left, constant = integer(left), number(divisor)
    floors = op(node) != "div" or node.kwargs.get("rounding_mode") == "floor"
    if (
        not isinstance(left, Affine)
        or not isinstance(divisor, Affine)
        or constant is None
        or constant <= 0
        or not floors
    ):
        raise Unknown(node)
    return FloorDiv(left, int(constant))


def _logical(make: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def combine(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
        if not _is_bool(node):
            raise Unknown(node)
        left, right = _binary(pull, node, indices)
        return make(as_condition(left), as_condition(right))

    return combine


def _not(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    if not _is_bool(node):
        raise Unknown(node)
    return negation(as_condition(pull.operand(node, arg(node, 0, "input"), indices)))


def _abs(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    x = pull.operand(node, arg(node, 0, "input"), indices)
    if isinstance(x, Affine):
        return Magnitude(x)
    raise Unknown(node)


def _where(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    condition, then, otherwise = _operands(pull, node, indices, "condition", "input", "other")
    return Where(as_condition(condition), then, otherwise)


def _masked_fill(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    x, mask, fill = _operands(pull, node, indices, "input", "mask", "value")
    return Where(as_condition(mask), fill, x)


def _triangle(upper: bool) -> Callable[..., Any]:
    """Tril keeps column - row <= diagonal, triu keeps column - row >= diagonal."""

    def triangle(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
        x = pull.operand(node, arg(node, 0, "input"), indices)
        diagonal = scalar_affine(arg(node, 1, "diagonal", 0))
        if diagonal is None:
            raise Unknown(node)
        above = indices[-1] - indices[-2] - diagonal
        keep = AtLeastZero(above if upper else -above)
        return conjunction(keep, as_condition(x)) if _is_bool(node) else Where(keep, x, Const(0.0))

    return triangle


def _cast(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    x = pull.operand(node, arg(node, 0, "input"), indices)
    if _is_bool(node):
        return as_condition(x)
    if not survives_cast(x, value(arg(node, 0, "input")).dtype, value(node).dtype):
        raise Unknown(node)
    return x


def _filled(get: Callable[[Node], Any]) -> Callable[..., Any]:
    def fill(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
        constant = get(node)
        if isinstance(constant, (bool, int, float)):
            return Const(float(constant))
        raise Unknown(node)

    return fill


def _arange(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    if value(node).is_floating_point():
        raise Unknown(node)
    bounds = node.args
    start = scalar_affine(bounds[0] if len(bounds) > 1 else node.kwargs.get("start", 0))
    step = bounds[2] if len(bounds) > 2 else node.kwargs.get("step", 1)
    if start is None or not isinstance(step, int):
        raise Unknown(node)
    return indices[0] * step + start


COMPUTED_ELEMENTS: dict[str, Callable[..., Any]] = {
    "arange": _arange,
    **dict.fromkeys(("floor_divide", "floordiv", "div"), _floor_divide),
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "abs": _abs,
    "neg": _neg,
    "ge": _comparison(operator.ge, False, 0),
    "gt": _comparison(operator.gt, False, 1),
    "le": _comparison(operator.le, True, 0),
    "lt": _comparison(operator.lt, True, 1),
    "ne": _ne,
    "eq": _eq,
    "and": _logical(conjunction),
    "or": _logical(disjunction),
    "not": _not,
    "where": _where,
    "masked_fill": _masked_fill,
    "tril": _triangle(False),
    "triu": _triangle(True),
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _filled(lambda n: 1)),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), _filled(lambda n: 0)),
    **dict.fromkeys(("full", "full_like"), _filled(lambda n: arg(n, 1, "fill_value"))),
    "new_full": _filled(lambda n: arg(n, 2, "fill_value")),
    "fill": _filled(lambda n: arg(n, 1, "value")),
    **dict.fromkeys(("tensor", "scalar_tensor"), _filled(lambda n: n.args[0])),
    **dict.fromkeys((*CASTS, "bool", "int", "long"), _cast),
}
"""How each operation's element follows from its inputs' elements. A new mask spelling is one line here."""
