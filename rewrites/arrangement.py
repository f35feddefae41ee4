"""Q, K and V of one attention in the layout of the operator, K and V where they lie in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import product
from typing import NamedTuple

import torch
from torch.fx import Node

from attnpatch.axes import Axes, Dims, Layout, Step
from attnpatch.errors import Refused
from attnpatch.graph import is_tensor, place, shape, value
from attnpatch.rewrites.operands import Reading, batch_axes, head_axes, names, peel, read, said
from attnpatch.rewrites.storage import Stored, Unwrapper
from attnpatch.rule import Operand, Recent, Storage, Turn


class Roles(NamedTuple):
    """What the dimensions of the two products are.

    Args:
        shared: q, k and the scores have them, in the scores' order.
        rows: only q has them, the query rows last.
        key: softmax is over it.
        feature: the first product sums over it.
        feature_v: only v and the output have it.
    """

    shared: Dims
    rows: Dims
    key: tuple[str, ...]
    feature: tuple[str, ...]
    feature_v: tuple[str, ...]


class Arrangement:
    """How q, k and v of one attention become ``[batch, heads, seqlen, head_dim]``.

    Attributes:
        layout: which axes are batch, heads (of K first, then within a group), rows and keys.
        feature_v: the axes of v's features.
        q: query.
        k: key: dense, or the pool of its pages, or codes.
        v: value.
        storage: how k and v lie in memory.
        sizes: num_heads, num_kv_heads and head_dim.
        seqlens: seqlen_q and seqlen_k.
        shifted: whether a vector that the original adds to all keys is left out: each row of scores is off by a number.
        reads: each tensor of these with the node that reads it in the original.
    """

    def __init__(
        self, axes: Axes, q: Operand, k: Operand, v: Operand, roles: Roles, reading: Reading, may_shift: bool = True
    ) -> None:
        self.axes, self.roles, self.reading, self._may_shift = axes, roles, reading, may_shift
        self._queries = peel(q, axes, reading)
        self._kept = ["", ""]
        *deeper, dense = self._pairs(k, v)
        if not any(self._is_arranged(*pair) for pair in deeper):
            self._arrange(*dense)

    def _is_arranged(self, k: Stored, v: Stored) -> bool:
        """Whether K and V could be handed over that way; then they are."""
        try:
            if value(self.reading.anchor).requires_grad:
                raise Refused("there is no backward to pools and codes")
            self._arrange(k, v)
            self._check_reads()
        except Refused as refusal:
            self._kept = [
                kept or (str(refusal) if x.packed else "") for kept, x in zip(self._kept, (k, v), strict=True)
            ]
            return False
        return True

    def _pairs(self, k: Operand, v: Operand) -> Iterator[tuple[Stored, Stored]]:
        """Ways to hand over K and V that go together, the deepest first; as attention reads them last."""
        unwrapper = Unwrapper(self.axes, self.roles.shared, self.reading, self.roles.key)
        of_k = unwrapper.ways(k, self.roles.feature, self._may_shift)
        of_v = unwrapper.ways(v, self.roles.feature_v)
        for pair in product(reversed(of_k), reversed(of_v)):
            if self._absent(pair[0]) == self._absent(pair[1]) and unwrapper.are_alike(*pair):
                yield pair
        if self._absent(of_k[0]) != self._absent(of_v[0]):  # repeated apart: as they are
            yield Stored(peel(k, self.axes, self.reading)), Stored(peel(v, self.axes, self.reading))

    def _absent(self, stored: Stored) -> set[str]:
        """Head axes that K or V does not have."""
        return set(head_axes(self.roles.shared, self.axes)) - names(stored.source.dims, self.axes)

    def _arrange(self, k: Stored, v: Stored) -> None:
        axes, roles = self.axes, self.roles
        self.layout, kv_heads = self._layout(self._absent(k))
        feature, self.feature_v = axes.resolve((roles.feature, roles.feature_v))
        batch, heads, row, key = self.layout
        self.q = self._choose(self._queries, (batch, heads, row, feature))
        table, blocks = self._table(k, batch, key)
        self.k, k_scales = self._placed(k, (batch, kv_heads, key, feature), blocks)
        self.v, v_scales = self._placed(v, (batch, kv_heads, key, self.feature_v), blocks)
        self.sizes = (axes.size(heads), axes.size(kv_heads), axes.size(feature))
        self.seqlens = (axes.size(row), axes.size(key))
        self._stored, self.shifted = (k, v), k.shifted
        k_turn, v_turn = (Turn() if x.packed is None else x.packed.turn for x in (k, v))
        unpacked = tuple(node for x in (k, v) if x.packed is not None for node in x.packed.steps)
        dtype = self._dtype(k.dtype, v.dtype)
        self._check_pools(k, v, dtype)
        k_scaling, v_scaling = (None if x.packed is None else x.packed.scaling for x in (k, v))
        recent = self._recent(k, v, (batch, kv_heads), (feature, self.feature_v))
        self.storage = Storage(
            *(dtype, table, k.counts_back, k_scales, v_scales, k_turn, v_turn, unpacked, self._words(k, v)),
            *(k_scaling, v_scaling, recent),
        )
        self.reads = list(self._reads())

    def _words(self, *both: Stored) -> tuple[str, ...]:
        """Why K or V is unpacked in the graph although it is made of codes."""
        reasons = ["" if x.packed else x.kept or kept for x, kept in zip(both, self._kept, strict=True)]
        if reasons[0] == reasons[1]:
            return (f"K and V unpacked: {reasons[0]}",) if reasons[0] else ()
        return tuple(f"{name} unpacked: {reason}" for name, reason in zip("KV", reasons, strict=True) if reason)

    def _layout(self, absent: set[str]) -> tuple[Layout, tuple[str, ...]]:
        every = head_axes(self.roles.shared, self.axes)
        kv_heads = tuple(axis for axis in every if axis not in absent)
        group = tuple(axis for axis in every if axis in absent)
        rows = self.axes.resolve(self.roles.rows)
        group += tuple(axis for dim in rows[:-1] for axis in dim)
        batch, key = batch_axes(self.roles.shared, self.axes), self.axes.resolve((self.roles.key,))[0]
        return Layout(batch, (*kv_heads, *group), rows[-1] if rows else (), key), kv_heads

    def _table(self, k: Stored, batch: tuple[str, ...], key: tuple[str, ...]) -> tuple[Operand | None, tuple[str, ...]]:
        """The block table, and the axes of the key that it has: the outer ones."""
        if k.ids is None:
            return None, ()
        own = names(k.ids[-1].dims, self.axes)
        blocks, page = (
            tuple(a for a in key if (a in own) == outer and not self.axes.is_one(a)) for outer in (True, False)
        )
        one_block = not blocks and len(k.ids[-1].dims) > 1
        if (*blocks, *page) != self.axes.bare((key,))[0] or not (blocks or one_block):
            raise Refused(f"{k.ids[-1].node.name} does not number the keys")
        return self._choose(self._bares(k.ids), self.axes.bare((batch, blocks))), blocks

    def _placed(self, x: Stored, dense: Dims, blocks: tuple[str, ...]) -> tuple[Operand, list[Operand] | None]:
        """K or V with the steps to the operator's layout, and its scales."""
        if x.packed is not None:
            dense = (*dense[:3], *self.axes.resolve(x.packed.codes.dims[-1:]))
        if x.ids is None:
            target, choices = dense, x.choices
        else:
            page = tuple(axis for axis in dense[2] if axis not in blocks)
            target = self.axes.bare(((x.picked,), dense[1], page, dense[3]))
            choices = self._bares(x.choices)
        placed = self._choose(choices, target)
        if x.ids is not None and _copies(placed):
            raise Refused(f"the pool {placed.node.name} would be copied")
        scales = x.scales or ()
        rows = [target[:3]] * len(scales) if x.packed is None else [(*target[:3], own) for own in x.packed.blocks]
        placed_scales = [self._scale(*pair) for pair in zip(scales, rows, strict=True)]
        return placed, None if x.scales is None else placed_scales

    def _recent(self, k: Stored, v: Stored, outer: Dims, features: Dims) -> Recent | None:
        """The rings of K and V."""
        found = [x.recent for x in (k, v) if x.recent is not None]
        if not found:
            return None
        if not all(x.is_of_window_of(found[0]) for x in found):
            raise Refused("other tokens of K than of V are kept as they were")
        if any(x.recent is None and (x.ids is not None or x.scales is not None) for x in (k, v)):
            raise Refused("tokens of one of K and V are kept as they were, and the other is codes or in pages")
        k_ring, v_ring = (
            None if x.recent is None else self._choose(x.recent.choices, (*outer, x.recent.rows, feature))
            for x, feature in zip((k, v), features, strict=True)
        )
        return Recent(k_ring, v_ring, found[0].node)

    def _scale(self, choices: list[Operand], target: Dims) -> Operand:
        """A scale that broadcasts to ``target``: the rows of K or V, of norms their blocks too."""
        if not is_tensor(choices[-1].node):
            return choices[-1]
        own = names(choices[-1].dims, self.axes)
        return self._choose(self._bares(choices), tuple(dim if own & {*dim} else () for dim in self.axes.bare(target)))

    def _choose(self, choices: list[Operand], target: Dims) -> Operand:
        """The choice that needs the fewest steps to the dims ``target``, with those steps."""
        steps, best = min(self._plans(choices, target), key=lambda item: len(item[0]))
        absent = names(target, self.axes) - names(best.dims, self.axes)
        if any(self.axes.sizes[axis] != 1 for axis in absent):
            raise Refused(f"{best.node.name} {said(shape(best.node))} is broadcast over the heads or the batch")
        return Operand(best.node, self.axes.resolve(best.dims), (*best.steps, *steps))

    def _plans(self, choices: list[Operand], target: Dims) -> list[tuple[list[Step], Operand]]:
        """The choices that can be brought to the dims ``target``, with the steps of each."""
        found: list[tuple[list[Step], Operand]] = []
        for x in choices:
            try:
                found.append((self.axes.plan(self.axes.resolve(x.dims), target), x))
            except Refused:
                if x is choices[-1] and not found:
                    raise
        return found

    def _bares(self, choices: list[Operand]) -> list[Operand]:
        return [x._replace(dims=self.axes.bare(x.dims)) for x in choices]

    def _dtype(self, *multiplied: torch.dtype | None) -> torch.dtype:
        """What attention runs in: the widest of what is multiplied; K and V may be codes that stand for it."""
        sources = (None, *multiplied)
        own = [dtype or value(x.node).dtype for dtype, x in zip(sources, (self.q, self.k, self.v), strict=True)]
        products = zip(own, self.reading.operands, self.reading.products, strict=True)
        return reduce(torch.promote_types, (_multiplied(source, *read) for source, *read in products))

    def _check_pools(self, k: Stored, v: Stored, dtype: torch.dtype) -> None:
        for x, stored in ((self.k, k), (self.v, v)):
            if stored.ids is not None and stored.scales is None and value(x.node).dtype != dtype:
                raise Refused(f"the pool {x.node.name} would be cast to {dtype}")

    def _reads(self) -> Iterator[tuple[Node, Node]]:
        _, table, _, k_scales, v_scales, *_ = self.storage
        packed = (None, *(x.packed for x in self._stored))
        sources = ([self.q], [self.k, table, *(k_scales or ())], [self.v, *(v_scales or ())])
        places = zip(sources, self.reading.operands, self.reading.products, packed, strict=True)
        for tensors, operand, reader, codes in places:
            for x in (x for x in tensors if x is not None and is_tensor(x.node)):
                yield read(x.node, operand, reader) if codes is None else codes.read(x.node)
        yield from self._recent_reads()

    def _recent_reads(self) -> Iterator[tuple[Node, Node]]:
        recent = self.storage.recent
        if recent is not None:
            rings = zip((recent.k_ring, recent.v_ring), (x.recent for x in self._stored), strict=True)
            yield from (read(ring.node, x.node, x.node) for ring, x in rings if ring is not None and x is not None)
            yield recent.window[1], recent.read

    def _check_reads(self) -> None:
        """Refuse to read a pool or codes later than the original does, when something is written there meanwhile."""
        for node, reader in self.reads:
            writer = self.reading.writes.between(node, reader, self.reading.anchor)
            if writer is not None:
                raise Refused(f"{node.name} is written in place ({place(writer)}) after it is read")


def _multiplied(source: torch.dtype, operand: Node, product: Node) -> torch.dtype:
    """What ``product`` multiplies ``operand`` in, whose values are in dtype ``source``.

    Torch multiplies two of one dtype: an operand in another than its product has was cast by autocast, outside the
    graph. Not where the product is asked for in a wider one.
    """
    read, made = value(operand).dtype, value(product).dtype
    return source if torch.promote_types(read, made) == made else made


def _copies(x: Operand) -> bool:
    """Whether the steps of ``x`` copy it: of a whole pool that is more than a gather."""
    fake = value(x.node)
    with fake.fake_mode, torch.no_grad():
        moved = reduce(lambda t, step: getattr(t, step[0])(*step[1]), x.steps, fake)
    return bool(moved.untyped_storage()._cdata != fake.untyped_storage()._cdata)
