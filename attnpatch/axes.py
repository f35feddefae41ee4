"""The axes of one attention, by name: what each dimension of each tensor means, whatever its layout.

A tensor's ``Dims`` hold one tuple of axes per dimension, outermost axis first; ``()`` is a dimension of size 1 that
broadcasts. ``[batch * heads, rows, dim]`` has the dims ``(("b", "h"), ("q",), ("d",))``. Views only regroup axes, a
permutation only reorders dims, and the products say which axis is a row, a key, a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.fx.experimental.symbolic_shapes import statically_known_true

from attnpatch.errors import Refused

Dims = tuple[tuple[str, ...], ...]

Step = tuple[str, tuple[Any, ...]]
"""A tensor method and its arguments."""


class Axes:
    """Names axes, knows their sizes, and splits one when a view does.

    Attributes:
        sizes: of every axis that is not split, int or SymInt.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, Any] = {}
        self._parts: dict[str, tuple[str, ...]] = {}

    def new(self, size: Any) -> str:
        """A fresh axis."""
        name = f"axis{len(self.sizes) + len(self._parts)}"
        self.sizes[name] = size
        return name

    def resolve(self, dims: Dims) -> Dims:
        """``dims`` with every split axis replaced by its parts."""
        return tuple(tuple(part for axis in dim for part in self._resolved(axis)) for dim in dims)

    def bare(self, dims: Dims) -> Dims:
        """``dims``, resolved, without axes of size 1: those a tensor may have or lack."""
        return tuple(tuple(a for a in dim if not self.is_one(a)) for dim in self.resolve(dims))

    def is_one(self, axis: str) -> bool:
        """Whether the size of an axis is known to be 1."""
        return isinstance(self.sizes[axis], int) and self.sizes[axis] == 1

    def _resolved(self, axis: str) -> tuple[str, ...]:
        parts = self._parts.get(axis)
        return (axis,) if parts is None else tuple(p for part in parts for p in self._resolved(part))

    def split(self, axis: str, sizes: Sequence[Any]) -> tuple[str, ...]:
        """Split ``axis`` into axes of ``sizes``, outermost first."""
        self._parts[axis] = tuple(self.new(size) for size in sizes)
        del self.sizes[axis]
        return self._parts[axis]

    def regroup(self, dims: Dims, source: Sequence[Any], target: Sequence[Any], cut: bool = False) -> Dims | None:
        """The dims after a view from shape ``source`` to shape ``target``; None when axes are cut across.

        With ``cut``, an axis that a dimension of the target ends within is split there.
        """
        runs = _matching_runs(source, target)
        if runs is None:
            return None
        out: list[tuple[str, ...]] = []
        for from_dims, sizes in runs:
            axes = tuple(axis for dim in self.resolve(tuple(dims[i] for i in from_dims)) for axis in dim)
            parts = self._distribute(self._cut(axes, sizes) if cut else axes, sizes)
            if parts is None:
                return None
            out += parts
        return tuple(out)

    def _distribute(self, axes: tuple[str, ...], sizes: list[Any]) -> list[tuple[str, ...]] | None:
        """``axes``, in order, as dimensions of ``sizes``; splits an axis that spans several."""
        if len(sizes) == 1:
            return [axes]
        if len(axes) == 1:
            return [(part,) for part in self.split(axes[0], sizes)]
        out: list[tuple[str, ...]] = []
        rest = list(axes)
        for size in sizes:
            dim: list[str] = []
            while rest and not _equal(self.size(dim), size):
                dim.append(rest.pop(0))
            if not _equal(self.size(dim), size):
                return None
            out.append(tuple(dim))
        return None if any(not _equal(self.sizes[axis], 1) for axis in rest) else out

    def _cut(self, axes: tuple[str, ...], sizes: list[Any]) -> tuple[str, ...]:
        """``axes`` with the first one split that does not fit into the first of ``sizes`` as a whole."""
        inside = 1
        for i, axis in enumerate(axes):
            part, whole = sizes[0] // inside, self.sizes[axis]
            fits = _equal(part % whole, 0) or _equal(inside, sizes[0])
            if not fits and _equal(inside * part, sizes[0]) and _equal(whole % part, 0):
                return (*axes[:i], *self.split(axis, (part, whole // part)), *axes[i + 1 :])
            inside = inside * whole
        return axes

    def size(self, axes: Sequence[str]) -> Any:
        """Of a dimension that merges ``axes``."""
        return _product([self.sizes[axis] for axis in axes])

    def plan(self, source: Dims, target: Dims) -> list[Step]:
        """Tensor methods that bring a tensor of dims ``source`` to dims ``target``; absent axes are expanded.

        Raises:
            Refused: two sizes of one split are known only at run time.
        """
        if len(source) == len(target) and all(s in (t, ()) for s, t in zip(source, target, strict=True)):
            return []
        steps: list[Step] = []
        units = self._units(source, target, steps)
        present = {axis for unit in units for axis in unit}
        order = [units.index(u) for dim in target for u in sorted((u for u in units if u[0] in dim), key=_place(dim))]
        if len(order) != len(units):
            raise Refused("a tensor has a dimension that attention knows nothing of")
        if order != sorted(order):
            steps.append(("permute", tuple(order)))
        for at, dim in enumerate(target):
            self._assemble(dim, present, at, [u for u in units if u[0] in dim], steps)
        return steps

    def _units(self, source: Dims, target: Dims, steps: list[Step]) -> list[tuple[str, ...]]:
        """What moves as a whole: a dimension where the target keeps it together, else single axes."""
        units: list[tuple[str, ...]] = []
        for dim in source:
            if not dim:
                steps.append(("squeeze", (len(units),)))
            elif len(dim) == 1 or any(_contains(t, dim) for t in target):
                units.append(dim)
            else:
                steps.append(("unflatten", (len(units), self._split_sizes(dim))))
                units += [(axis,) for axis in dim]
        return units

    def _split_sizes(self, dim: tuple[str, ...]) -> tuple[int, ...]:
        sizes = [self.sizes[axis] if isinstance(self.sizes[axis], int) else -1 for axis in dim]
        if sizes.count(-1) > 1:
            raise Refused("a dimension merges two sizes that are known only at run time")
        return tuple(sizes)

    def _assemble(
        self, dim: tuple[str, ...], present: set[str], at: int, units: list[tuple[str, ...]], steps: list[Step]
    ) -> None:
        """Bring the target's dimension at position ``at`` together."""
        if not units:
            steps.append(("unsqueeze", (at,)))
            return
        parts = len(units)
        missing = [axis for axis in dim if axis not in present]
        if missing:
            parts = self._expand(dim, missing, at, units, steps)
        if parts > 1:
            steps.append(("flatten", (at, at + parts - 1)))

    def _expand(
        self, dim: tuple[str, ...], missing: list[str], at: int, units: list[tuple[str, ...]], steps: list[Step]
    ) -> int:
        """Expand absent axes, so that the dimension is whole; returns of how many dimensions it then consists."""
        order = sorted([*units, *((axis,) for axis in missing)], key=_place(dim))
        for i, unit in enumerate(order):
            if unit[0] in missing:
                if not isinstance(self.sizes[unit[0]], int):
                    raise Refused("a mask would have to be repeated over a size that is known only at run time")
                steps.append(("unsqueeze", (at + i,)))
                steps.append(("repeat_interleave", (self.sizes[unit[0]], at + i)))
        return len(order)


def _place(dim: tuple[str, ...]) -> Any:
    return lambda unit: dim.index(unit[0])


def _contains(whole: tuple[str, ...], part: tuple[str, ...]) -> bool:
    return any(whole[i : i + len(part)] == part for i in range(len(whole)))


def _equal(a: Any, b: Any) -> bool:
    return bool(statically_known_true(a == b))


def _product(sizes: Sequence[Any]) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * size
    return total


def _matching_runs(source: Sequence[Any], target: Sequence[Any]) -> list[tuple[list[int], list[Any]]] | None:
    """Runs of dimensions with equal products: (indices in ``source``, sizes in ``target``), in order.

    A size of 1 in the target is a dimension of its own unless it leads: [8, n, n] to [1, 8, n, n] is a batch of one.
    """
    runs: list[tuple[list[int], list[Any]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        if j < len(target) and j > 0 and _equal(target[j], 1) and not (i < len(source) and _equal(source[i], 1)):
            runs.append(([], [target[j]]))
            j += 1
            continue
        run = _next_run(source, target, i, j)
        if run is None:
            return None
        i, j = run[0][-1] + 1 if run[0] else i, j + len(run[1])
        runs.append(run)
    return runs


def _next_run(source: Sequence[Any], target: Sequence[Any], i: int, j: int) -> tuple[list[int], list[Any]] | None:
    """The shortest run from (i, j) on with equal products."""
    if j == len(target):  # trailing dimensions of size 1
        return ([i], []) if _equal(source[i], 1) else None
    if i == len(source):
        return None
    for m in range(1, len(source) - i + len(target) - j):
        for rows in range(max(1, m - (len(target) - j) + 1), min(m, len(source) - i) + 1):
            cols = m - rows + 1
            if _equal(_product(source[i : i + rows]), _product(target[j : j + cols])):
                return list(range(i, i + rows)), list(target[j : j + cols])
    return None


class Layout(NamedTuple):
    """What the axes of one attention are: each field a group of axes, outermost first, that are one dimension."""

    batch: tuple[str, ...]
    heads: tuple[str, ...]
    row: tuple[str, ...]
    key: tuple[str, ...]

    @property
    def scores(self) -> Dims:
        """``[batch, num_heads, seqlen_q, seqlen_k]``."""
        return tuple(self)
