"""What an element of a mask can be, as an expression of (b, h, q, k); integers are :class:`attnpatch.affine.Affine`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from attnpatch.affine import Affine


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
class Magnitude:
    """``|expression|`` of an integer expression."""

    expression: Affine


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


BOOLEAN = (AtLeastZero, And, Or, Not)


class Unknown(Exception):
    """An operation whose element has no expression here."""


def number(x: Any) -> float | None:
    """The value of a constant expression, else None."""
    if isinstance(x, Const):
        return x.value
    return float(x.constant) if isinstance(x, Affine) and x.is_constant else None


def as_condition(x: Any) -> Any:
    """``x != 0`` as a boolean expression."""
    if isinstance(x, (*BOOLEAN, Load)):
        return x
    constant = number(x)
    if constant is None:
        raise Unknown(x)
    return Const(float(constant != 0))
