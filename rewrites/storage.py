"""How K or V lies in memory: as attention reads it, or as a pool with ids of pages, or as codes with scales or norms.

before   k = (pool[ids].float() * scales[ids]).reshape(...)
after    the pool, the ids and the scales as terms of the operator; nothing is gathered, multiplied out or unpacked
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attnpatch.axes import Axes, Dims
from attnpatch.errors import Refused
from attnpatch.graph import VIEWS, arg, is_one, is_tensor, op, shape, value
from attnpatch.rewrites.codes import Packed, read_packed
from attnpatch.rewrites.constants import Constants
from attnpatch.rewrites.dequant import is_codes, is_made_of_codes, read_factor
from attnpatch.rewrites.gathers import Gather, read_gather
from attnpatch.rewrites.nibbles import is_unpacked
from attnpatch.rewrites.operands import Reading, names, peel, regroups, way
from attnpatch.rule import Operand

_PURE = frozenset(
    [*VIEWS, "add", "sub", "mul", "floordiv", "floor_divide", "mod", "remainder", "arange", "long", "int", "size"]
)
"""Of what ids are computed."""


class Ring(NamedTuple):
    """Tokens of K or V as they were.

    Args:
        choices: the ring, the same values as several nodes.
        node: what reads it: ``with_recent(codes multiplied out, ring, position, new)``.
        rows: the axis of its rows.
    """

    choices: list[Operand]
    node: Node
    rows: tuple[str, ...]

    def is_of_window_of(self, other: Ring) -> bool:
        """Whether both keep the same tokens."""
        same = [arg(x.node, 2, "position") for x in (self, other)], [arg(x.node, 3, "new") for x in (self, other)]
        sizes = [shape(arg(x.node, 1, "ring"))[2] for x in (self, other)]
        return all(a is b or a == b for a, b in same) and bool(statically_known_true(operator.eq(*sizes)))


class Stored(NamedTuple):
    """One way K or V lies in memory. Of every tensor the same values as several nodes, see :func:`operands.peel`.

    Args:
        choices: the tensor, the pool or the codes.
        ids: which pages or tokens of the pool are the keys, or None.
        picked: the axis of the pool that the ids number.
        counts_back: whether a negative id counts from its end.
        scales: what the codes are multiplied by, or None when there are none to multiply. Of codes of 4 bits, the
            norms, or scales and zero points or shifts.
        dtype: of the product of codes and scales.
        packed: of codes of 4 bits, how they are unpacked.
        recent: of codes, the node that reads other tokens than these from a ring; and the ring, as its tensors are.
        shifted: whether K is this plus a vector that is the same for all keys, which softmax forgets.
        kept: why it is not known to be packed although it is made of nibbles, a sentence.
    """

    choices: list[Operand]
    ids: list[Operand] | None = None
    picked: str = ""
    counts_back: bool = False
    scales: tuple[list[Operand], ...] | None = None
    dtype: torch.dtype | None = None
    packed: Packed | None = None
    recent: Ring | None = None
    shifted: bool = False
    kept: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether this is K or V, not a step on the way to codes."""
        is_read = self.scales is None and not self.shifted and self.recent is None
        return is_read or self.packed is not None or is_codes(self.source)

    @property
    def source(self) -> Operand:
        """What nothing more is known to be made of."""
        return self.choices[-1]


class Unwrapper:
    """Takes gathers, scales and the unpacking of codes off K or V.

    Args:
        axes: of the attention.
        shared: the dims that K and V share with q.
        reading: when they are read, and what is written.
        key: the axis of keys.
    """

    def __init__(self, axes: Axes, shared: Dims, reading: Reading, key: tuple[str, ...]) -> None:
        self.axes, self.shared, self.reading, self.key = axes, shared, reading, key
        self._constants = Constants(reading.writes)

    def ways(self, x: Operand, feature: tuple[str, ...], may_shift: bool | None = None) -> list[Stored]:
        """Every way ``x`` can be handed to the operator: first as attention reads it, then ever deeper.

        Args:
            x: K or V.
            feature: the axis of its channels.
            may_shift: whether a vector that is added to all keys may be left out; None of V.
        """
        stored: Stored | None = Stored(self._peel(x))
        found: list[Stored] = []
        while stored is not None:
            if stored.is_whole:
                found.append(stored)
            try:
                stored = self._deeper(stored, feature, may_shift)
            except Refused as refusal:
                return [*found[:-1], found[-1]._replace(kept=str(refusal))]
        return found

    def _deeper(self, stored: Stored, feature: tuple[str, ...], may_shift: bool | None) -> Stored | None:
        shifted = None if may_shift is None else self._unshifted(stored)
        if shifted and not may_shift:
            raise Refused("a vector is added to all keys, and softcap, sinks or the logsumexp need the scores with it")
        unpacked = shifted or self._without_recent(stored) or self._unpacked(stored, feature)
        return unpacked or self._ungathered(stored) or self._unscaled(stored, feature)

    def _unshifted(self, stored: Stored) -> Stored | None:
        """Codes multiplied out or unpacked, without the vector that is then added to each key."""
        x = self._resolved(stored.source)
        if op(x.node) != "add" or x.steps or stored.scales is not None or "alpha" in x.node.kwargs:
            return None
        key = self.axes.resolve((self.key,))[0]
        both = arg(x.node, 0, "input"), arg(x.node, 1, "other")
        for rows, other in (both, both[::-1]):
            if not is_tensor(rows) or shape(rows) != shape(x.node) or not is_tensor(other):
                continue
            dims = zip(shape(other), x.dims[len(x.dims) - len(shape(other)) :], strict=True)
            is_same = all(is_one(size) or not set(dim) & set(key) for size, dim in dims)
            source = Operand(rows, x.dims)
            if is_same and (is_made_of_codes(source) or is_unpacked(rows)) and self.reading.is_kept(x.node, rows):
                return Stored(self._peel(source), dtype=value(x.node).dtype, shifted=True)
        return None

    def _without_recent(self, stored: Stored) -> Stored | None:
        """What is stored of all tokens, where some are read from a ring instead."""
        x = self._resolved(stored.source)
        if op(x.node) != "with_recent" or x.steps or stored.recent is not None:
            return None
        codes, ring = arg(x.node, 0, "stored"), arg(x.node, 1, "ring")
        if x.dims[2] != self.axes.resolve((self.key,))[0]:
            raise Refused(f"the keys of {x.node.name} are not its dimension 2")
        if not all(self.reading.is_kept(x.node, source) for source in (codes, ring)):
            raise Refused(f"{x.node.name} is written in place")
        rows = (self.axes.new(shape(ring)[2]),)
        found = Ring(self._peel(Operand(ring, (*x.dims[:2], rows, x.dims[3]))), x.node, rows)
        dtype = stored.dtype or value(x.node).dtype
        return stored._replace(choices=self._peel(Operand(codes, x.dims)), recent=found, dtype=dtype)

    def _unpacked(self, stored: Stored, feature: tuple[str, ...]) -> Stored | None:
        """The codes of 4 bits that K or V is unpacked of."""
        if stored.scales is not None or not is_tensor(stored.source.node):
            return None
        feature = self.axes.resolve((feature,))[0]
        packed = read_packed(self._resolved(stored.source), feature, self.axes, self.reading, self._constants)
        if packed is None:
            return None
        choices, norms = self._peel(packed.codes), tuple(self._peel(x) for x in packed.norms)
        dtype = stored.dtype or value(stored.source.node).dtype
        return stored._replace(choices=choices, scales=norms, dtype=dtype, packed=packed)

    def _peel(self, x: Operand) -> list[Operand]:
        return peel(x, self.axes, self.reading, self.shared) if is_tensor(x.node) else [x]

    def _ungathered(self, stored: Stored) -> Stored | None:
        """The pool of a gather, with the scales' own pools."""
        gather = self._gather(stored.source)
        if gather is None or stored.ids is not None:
            return None
        picked, ids = self.axes.new(gather.size), self._peel(gather.ids)
        scales = [self._scale_pool(scale, gather, picked) for scale in stored.scales or ()]
        if any(scale is None for scale in scales):
            return None
        kept = None if stored.scales is None else tuple(scale for scale in scales if scale is not None)
        pool = self._peel(gather.source(picked))
        return stored._replace(choices=pool, ids=ids, picked=picked, counts_back=gather.counts_back, scales=kept)

    def _gather(self, x: Operand) -> Gather | None:
        """The gather that ``x`` is, or is a view of that cuts across pages and sequences, and still holds."""
        found = self._read_gather(x)
        is_kept = found is not None and all(self.reading.is_kept(*step) for step in way(x.node, found.pool))
        return found if is_kept else None

    def _read_gather(self, x: Operand) -> Gather | None:
        inner = arg(x.node, 0, "input") if regroups(x.node) and not x.steps else None
        if inner is not None and read_gather(Operand(inner, ((),) * len(shape(inner)))):
            dims = self.axes.regroup(x.dims, shape(x.node), shape(inner), cut=True)
            return None if dims is None else read_gather(self._resolved(Operand(inner, dims)))
        return read_gather(self._resolved(x))

    def _scale_pool(self, scale: list[Operand], gather: Gather, picked: str) -> list[Operand] | None:
        """The pool of a scale that the same ids pick from, or a scale that is the same for all that is picked."""
        if not names(scale[-1].dims, self.axes) & names(gather.ids.dims, self.axes):
            return scale
        own = self._gather(scale[-1])
        if own is None or not self._are_same(own.ids, gather.ids) or not statically_known_true(own.size == gather.size):
            return None
        return self._peel(own.source(picked))

    def _unscaled(self, stored: Stored, feature: tuple[str, ...]) -> Stored | None:
        """What one cast or one scale is taken off of."""
        if stored.packed or is_codes(stored.source) or not is_made_of_codes(stored.source):
            return None
        found = read_factor(self._resolved(stored.source), self.axes.resolve((feature,))[0])
        if found is None:
            return None
        rows, factor = found
        if not self.reading.is_kept(stored.source.node, rows.node):
            return None
        scales = (*(stored.scales or ()), *([] if factor is None else [self._peel(factor)]))
        dtype = stored.dtype or value(stored.source.node).dtype
        return stored._replace(choices=self._peel(rows), scales=scales, dtype=dtype)

    def _resolved(self, x: Operand) -> Operand:
        return x._replace(dims=self.axes.resolve(x.dims))

    def are_alike(self, k: Stored, v: Stored) -> bool:
        """Whether K and V lie in pages that one block table numbers, or neither does."""
        if k.ids is None or v.ids is None:
            return k.ids is v.ids
        sizes = (self.axes.size(self.axes.resolve(((x.picked,),))[0]) for x in (k, v))
        return statically_known_true(operator.eq(*sizes)) and self._are_same(k.ids[-1], v.ids[-1])

    def _are_same(self, a: Operand, b: Operand) -> bool:
        """Whether two ids hold the same and mean the same."""
        x, y = (self._peel(ids)[-1] for ids in (a, b))
        mean_the_same = self.axes.bare(x.dims) == self.axes.bare(y.dims)
        return mean_the_same and (x.node is y.node or self._meaning(x.node) == self._meaning(y.node))

    def _meaning(self, x: Any) -> Any:
        """A node as what computes it, so that two can be compared; the node itself when writes may come between."""
        if isinstance(x, (tuple, list)):
            return tuple(self._meaning(part) for part in x)
        if isinstance(x, slice):
            return self._meaning((x.start, x.stop, x.step))
        if op(x) not in _PURE or any(self.reading.writes.touches(n) for n in (x, *x.all_input_nodes) if is_tensor(n)):
            return x
        return (x.target, *(self._meaning(part) for part in (*x.args, *x.kwargs.items())))
