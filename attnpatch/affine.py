"""Integer expressions of a mask: sums of index variables and scalars that live in the graph.

    q + offset - k   is   Affine({"q": 1, "k": -1, <node offset>: 1}, 0)

Index variables are strings: "b", "h", "q" and "k", and names of axes that are part of one of these. Other atoms are FX
nodes that yield a SymInt or a 0-d integer tensor, and elements of integer tensors (expressions.Load).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from attnpatch.graph import arg, op, value


class Affine:
    """An integer-valued ``sum(coefficient * atom) + constant``; immutable."""

    def __init__(self, coefficients: dict[Any, int] | None = None, constant: int = 0) -> None:
        self.coefficients = {atom: c for atom, c in (coefficients or {}).items() if c}
        self.constant = constant

    def __add__(self, other: Affine | int) -> Affine:
        other = other if isinstance(other, Affine) else Affine(constant=other)
        atoms = {**self.coefficients}
        for atom, c in other.coefficients.items():
            atoms[atom] = atoms.get(atom, 0) + c
        return Affine(atoms, self.constant + other.constant)

    def __mul__(self, factor: int) -> Affine:
        return Affine({a: c * factor for a, c in self.coefficients.items()}, self.constant * factor)

    def __neg__(self) -> Affine:
        return self * -1

    def __sub__(self, other: Affine | int) -> Affine:
        return self + (-other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Affine) and not (self - other).coefficients and self.constant == other.constant

    def __hash__(self) -> int:
        return hash((frozenset(self.coefficients.items()), self.constant))

    def __getitem__(self, variable: str) -> int:
        """Coefficient of an index variable."""
        return self.coefficients.get(variable, 0)

    @property
    def is_constant(self) -> bool:
        """Whether it is a plain integer."""
        return not self.coefficients

    @property
    def is_scalar(self) -> bool:
        """Whether it is the same for every index: made of nodes alone."""
        return all(isinstance(atom, Node) for atom in self.coefficients)

    def without(self, *variables: str) -> Affine:
        """The expression less its index variables."""
        return Affine({a: c for a, c in self.coefficients.items() if a not in variables}, self.constant)


def scalar_affine(x: Any) -> Affine | None:
    """A Python int, a SymInt node or a 0-d integer tensor node as an Affine; None for anything else."""
    if isinstance(x, bool):
        return None
    if isinstance(x, int):
        return Affine(constant=x)
    if not isinstance(x, Node) or not _is_integer_scalar(value(x)):
        return None
    if op(x) in ("add", "sub") and not isinstance(value(x), Tensor):
        left, right = scalar_affine(arg(x, 0, "input")), scalar_affine(arg(x, 1, "other"))
        if left is not None and right is not None and arg(x, 2, "alpha", 1) == 1:
            return left + right if op(x) == "add" else left - right
    return Affine({x: 1})


def _is_integer_scalar(v: Any) -> bool:
    if isinstance(v, Tensor):
        return v.dim() == 0 and v.dtype in (torch.int32, torch.int64)
    return isinstance(v, (int, torch.SymInt)) and not isinstance(v, bool)
