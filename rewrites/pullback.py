"""Read a mask back as an expression of its element at (b, h, q, k).

A mask is a small graph over aranges, comparisons and broadcasts. Asking for its element at symbolic indices and
pushing the question through every operation to its inputs ("pulling the indices back") removes all spelling:

    where(le(arange(n)[None, None, None, :], arange(n)[None, None, :, None] + 4), 0.0, -inf)  at (b, h, q, k)
        ->  Where(AtLeastZero(q + 4 - k), Const(0.0), Const(-inf))

An operation nobody knows becomes a leaf: ``Load(node, indices)``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from attnpatch.affine import Affine, scalar_affine
from attnpatch.graph import CASTS, VIEWS, Writes, arg, normal_dim, op, shape, value
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
    loads,
    negation,
    number,
    survives_cast,
)


class Pullback:
    """Pull indices back through a graph; remembers which nodes it read, and where scalars were read.

    Attributes:
        writes: the graph's in-place writes.
        views_only: whether only views are looked through, so that elements of one tensor are seen to be that.
        levels: inside vmap, the index of what each level runs over.
        now: the node that reads what is being looked at; a tensor may hold something else for another.
        readers: for each node that became an atom of an Affine, the node that read it.
    """

    def __init__(self, writes: Writes, now: Node) -> None:
        self.writes = writes
        self.now = now
        self.views_only = False
        self.levels: dict[int, Affine] = {}
        self.readers: dict[Node, Node] = {}

    def element(self, x: Any, indices: tuple[Affine, ...]) -> Any:
        """The element of ``x`` at ``indices``, one per dimension of ``x``; Affine when it is an integer."""
        if not isinstance(x, Node):
            return _constant(x)
        scalar = scalar_affine(x)
        if scalar is not None and (not isinstance(value(x), Tensor) or op(x) not in OPERATIONS):
            return scalar
        if not isinstance(value(x), Tensor):
            raise Unknown(x)
        operation = OPERATIONS.get(op(x)) or OPERATIONS.get(op(x).removesuffix("_"))  # x.triu_() of what x was
        if self.views_only and op(x) not in (*VIEWS, "index"):
            operation = None
        if operation is None or self.writes.between(x, x, self.now):  # written: its operation is not what it holds
            return Load(x, indices)
        reader = self.now
        try:
            self.now = reader if op(x) in VIEWS else x  # through a view, the memory is read later
            return operation(self, x, indices)
        except Unknown:
            return Load(x, indices)
        finally:
            self.now = reader

    def inside(self, x: Any, indices: tuple[Affine, ...]) -> Any:
        """The element of a tensor inside vmap, which no code outside can load."""
        result = self.element(x, indices)
        if any(_is_inside_vmap(load.node) for load in loads(result)):
            raise Unknown(x)
        return result

    def operand(self, reader: Node, x: Any, indices: tuple[Affine, ...]) -> Any:
        """The element of ``x`` where ``reader``, of the given indices, reads it under broadcasting."""
        if isinstance(x, Node) and isinstance(value(x), Tensor):
            scalar = scalar_affine(x)
            if scalar is not None and x in scalar.coefficients:
                first = self.readers.setdefault(x, self.now)
                if self.writes.between(x, first, self.now) or self.writes.between(x, self.now, first):
                    raise Unknown(x)  # one scalar, two values
            return self.element(x, broadcast(indices, x))
        return self.element(x, ())


def _is_inside_vmap(node: Node, depth: int = 32) -> bool:
    """Whether ``node`` is made inside vmap: what it is made of enters one and does not leave it."""
    if op(node) == "_add_batch_dim":
        return True
    return (
        bool(depth)
        and op(node) != "_remove_batch_dim"
        and any(_is_inside_vmap(x, depth - 1) for x in node.all_input_nodes)
    )


def broadcast(indices: tuple[Affine, ...], x: Node) -> tuple[Affine, ...]:
    """Indices into ``x`` that, right-aligned, broadcast to ``indices``: size-1 dimensions are read at 0."""
    sizes = shape(x)
    aligned = indices[len(indices) - len(sizes) :]
    return tuple(Affine() if _is_one(s) else i for s, i in zip(sizes, aligned, strict=True))


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _constant(x: Any) -> Any:
    if isinstance(x, bool) or (isinstance(x, int) and not isinstance(x, bool)):
        return Const(float(x)) if isinstance(x, bool) else Affine(constant=x)
    if isinstance(x, float):
        return Const(x)
    raise Unknown(x)


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


def _add_batch_dim(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    """Inside vmap a tensor lacks the dimension that vmap runs over; its index is known by vmap's level."""
    dim, level = arg(node, 1, "batch_dim"), arg(node, 2, "level")
    return pull.element(arg(node, 0, "input"), (*indices[:dim], pull.levels[level], *indices[dim:]))


def _remove_batch_dim(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    """Leave vmap: dimension ``dim`` is what ran at ``level``."""
    level, dim = arg(node, 1, "level"), arg(node, 3, "out_dim")
    pull.levels[level] = indices[dim]
    try:
        return pull.inside(arg(node, 0, "input"), indices[:dim] + indices[dim + 1 :])
    finally:
        del pull.levels[level]


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


def _expand(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    return pull.operand(node, arg(node, 0, "input"), indices)


def _unsqueeze(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    dim = normal_dim(node, arg(node, 1, "dim"))
    return pull.element(arg(node, 0, "input"), indices[:dim] + indices[dim + 1 :])


def _transpose(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    a, b = (normal_dim(node, arg(node, i, f"dim{i - 1}")) for i in (1, 2))
    order = list(indices)
    order[a], order[b] = order[b], order[a]
    return pull.element(arg(node, 0, "input"), tuple(order))


def _reshape(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    """Only reshapes that add or drop dimensions of size 1."""
    source = shape(arg(node, 0, "input"))
    kept = [i for i, size in zip(indices, shape(node), strict=True) if not _is_one(size)]
    wide = [s for s in shape(node) if not _is_one(s)]
    if wide != [s for s in source if not _is_one(s)]:
        raise Unknown(node)
    return pull.element(arg(node, 0, "input"), tuple(Affine() if _is_one(s) else kept.pop(0) for s in source))


def _getitem(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    source, items = arg(node, 0, "input"), arg(node, 1, "other")
    if not isinstance(value(source), Tensor):
        raise Unknown(node)
    as_tuple = isinstance(items, tuple) or op(node) == "index"
    items = list(items) if as_tuple else [items]
    if any(isinstance(i, Node) and isinstance(value(i), Tensor) and value(i).dim() > 0 for i in items):
        return _gather(pull, node, source, items, indices)
    return pull.element(source, _sliced(node, source, items, list(indices)))


def _sliced(node: Node, source: Node, items: list[Any], indices: list[Affine]) -> tuple[Affine, ...]:
    """Indices into ``source`` of basic indexing: None, slices, integers and one Ellipsis."""
    consumed = sum(item is not None and item is not Ellipsis for item in items)
    fill = [slice(None)] * (len(shape(source)) - consumed)
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    items = items[:at] + fill + items[at + 1 :]
    out: list[Affine] = []
    for item in items:
        if item is None:
            indices.pop(0)
        elif isinstance(item, slice):
            out.append(_slice_start(node, item, shape(source)[len(out)]) + indices.pop(0) * (item.step or 1))
        else:
            out.append(_position(node, item, shape(source)[len(out)]))
    return tuple(out)


def _slice_start(node: Node, item: slice, size: Any) -> Affine:
    if not isinstance(item.step or 1, int) or (item.step or 1) < 0:
        raise Unknown(node)
    return Affine() if item.start is None else _position(node, item.start, size)


def _position(node: Node, item: Any, size: Any) -> Affine:
    """An index of basic indexing, counted from the front."""
    position = scalar_affine(item)
    if position is None or (position.is_constant and position.constant < 0 and not isinstance(size, int)):
        raise Unknown(node)
    if position.is_constant and position.constant < 0:
        return Affine(constant=max(0, position.constant + size))
    return position


def _gather(pull: Pullback, node: Node, source: Node, items: list[Any], indices: tuple[Affine, ...]) -> Any:
    """Advanced indexing ``source[t0, t1, ...]`` by integer tensors in the leading dimensions."""
    tensors = [i for i in items if isinstance(i, Node)]
    if len(tensors) != len(items) or any(value(t).dtype == torch.bool for t in tensors):
        raise Unknown(node)
    rest = len(shape(source)) - len(tensors)
    lead = indices[: len(indices) - rest]
    where = [pull.operand(node, t, lead) for t in tensors]
    if not all(isinstance(i, Affine) and min(i.constant, 0, *i.coefficients.values()) == 0 for i in where):
        raise Unknown(node)  # a negative position counts from the end
    return pull.element(source, (*where, *indices[len(indices) - rest :]))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "arange": _arange,
    **dict.fromkeys(("getitem", "index"), _getitem),
    "_add_batch_dim": _add_batch_dim,
    "_remove_batch_dim": _remove_batch_dim,
    **dict.fromkeys(("floor_divide", "floordiv", "div"), _floor_divide),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    "unsqueeze": _unsqueeze,
    "transpose": _transpose,
    **dict.fromkeys(("view", "reshape", "squeeze"), _reshape),
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
