"""What an element of a mask can be, as an expression of (b, h, q, k); integers are :class:`attnpatch.affine.Affine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.fx import Node

from attnpatch.affine import Affine
from attnpatch.graph import value


@dataclass(frozen=True)
class Const:
    """A constant element."""

    value: float


@dataclass(frozen=True)
class Load:
    """Element ``node[indices]`` of a tensor that stays opaque."""

    node: Node
    indices: tuple[Affine, ...]


@dataclass(frozen=True)
class AtLeastZero:
    """``expression >= 0``."""

    expression: Affine


@dataclass(frozen=True)
class FloorDiv:
    """``numerator // divisor`` of integers."""

    numerator: Affine
    divisor: int


@dataclass(frozen=True)
class Equal:
    """``left == right`` of integer expressions that depend on q and on k."""

    left: Any
    right: Any


@dataclass(frozen=True)
class Magnitude:
    """``|expression|`` of an integer expression."""

    expression: Affine


@dataclass(frozen=True)
class Sloped:
    """``slope * factor * distance``: an element of a tensor of slopes (None: 1) times an integer expression."""

    slope: Load | None
    distance: Any
    factor: float = 1.0


@dataclass(frozen=True)
class And:
    """Conjunction."""

    left: Any
    right: Any


@dataclass(frozen=True)
class Or:
    """Disjunction."""

    left: Any
    right: Any


@dataclass(frozen=True)
class Not:
    """Negation of a boolean expression."""

    operand: Any


@dataclass(frozen=True)
class Where:
    """``then`` where ``condition`` holds, else ``otherwise``."""

    condition: Any
    then: Any
    otherwise: Any


@dataclass(frozen=True)
class Sum:
    """Sum of two real-valued expressions."""

    left: Any
    right: Any


BOOLEAN = (AtLeastZero, Equal, And, Or, Not)
INTEGER: tuple[Any, ...] = (Affine, Magnitude)


class Unknown(Exception):
    """An operation whose element has no expression here."""


def number(x: Any) -> float | None:
    """The value of a constant expression, else None."""
    if isinstance(x, Const):
        return x.value
    return float(x.constant) if isinstance(x, Affine) and x.is_constant else None


def integer(x: Any) -> Any:
    """``x`` as an Affine where it is the element of an integer tensor at an index without k; else as it is."""
    if not isinstance(x, Load) or any(i["k"] for i in x.indices):
        return x
    return Affine({x: 1}) if value(x.node).dtype in (torch.int32, torch.int64) else x


def as_condition(x: Any) -> Any:
    """``x != 0`` as a boolean expression."""
    if isinstance(x, (*BOOLEAN, Load)):
        return x
    if isinstance(x, Where):
        then, otherwise = as_condition(x.then), as_condition(x.otherwise)
        if then == otherwise:
            return then
        return disjunction(conjunction(x.condition, then), conjunction(negation(x.condition), otherwise))
    constant = number(x)
    if constant is None:
        raise Unknown(x)
    return Const(float(constant != 0))


def conjunction(left: Any, right: Any) -> Any:
    """``left and right`` of boolean expressions, constants folded."""
    for constant, other in ((number(left), right), (number(right), left)):
        if constant is not None:
            return other if constant else Const(0.0)
    return And(left, right)


def disjunction(left: Any, right: Any) -> Any:
    """``left or right`` of boolean expressions, constants folded."""
    for constant, other in ((number(left), right), (number(right), left)):
        if constant is not None:
            return Const(1.0) if constant else other
    return Or(left, right)


def negation(x: Any) -> Any:
    """``not x`` of a boolean expression, constants folded."""
    constant = number(x)
    if constant is not None:
        return Const(float(not constant))
    return x.operand if isinstance(x, Not) else Not(x)


def leafwise(x: Any, function: Callable[[float], float]) -> Any:
    """``function`` of a value that is one of few constants: (1 - Where(c, 1, 0)) is Where(c, 0, 1)."""
    if isinstance(x, Where):
        return Where(x.condition, leafwise(x.then, function), leafwise(x.otherwise, function))
    if isinstance(x, BOOLEAN) or (isinstance(x, Load) and value(x.node).dtype == torch.bool):
        return Where(x, Const(float(function(1.0))), Const(float(function(0.0))))
    constant = number(x)
    if constant is None:
        raise Unknown(x)
    return Const(float(function(constant)))


def survives_cast(x: Any, source: torch.dtype, target: torch.dtype) -> bool:
    """Whether casting ``x``, an expression in dtype ``source``, to ``target`` (not bool) leaves it what it is."""
    if isinstance(x, INTEGER):  # int8 wraps, bfloat16 rounds from 257 on
        return target in (torch.int32, torch.int64, torch.float32, torch.float64)
    if isinstance(x, Where):
        return all(survives_cast(branch, source, target) for branch in (x.then, x.otherwise))
    if isinstance(x, Const):
        return target.is_floating_point or (x.value.is_integer() and (x.value >= 0 or target != torch.uint8))
    if isinstance(x, (Load, Sum, Sloped)):
        return torch.promote_types(source, target) == target
    return True


def loads(x: Any) -> Iterator[Load]:
    """Every load in an expression."""
    if isinstance(x, Load):
        yield x
    elif isinstance(x, Affine):
        yield from (atom for atom in x.coefficients if isinstance(atom, Load))
    elif is_dataclass(x):
        for part in fields(x):
            yield from loads(getattr(x, part.name))
