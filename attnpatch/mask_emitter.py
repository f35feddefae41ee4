"""Put the mask of a site into its graph as the operator takes it; what layers share is built once."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from attnpatch.affine import Affine
from attnpatch.edges import EdgeEmitter, scalar_nodes, tensor_nodes
from attnpatch.graph import Writes, emit, is_tensor, shape, value
from attnpatch.rule import Operand, Site, Streamed, Terms


class Keys(NamedTuple):
    """K and V as the operator takes them."""

    k: Node
    v: Node
    block_table: Node | None
    k_scale: Node | None
    v_scale: Node | None
    k_shift: Node | None
    v_shift: Node | None

    @property
    def seqlen_k(self) -> Any:
        """Keys per sequence."""
        return shape(self.k)[2] if self.block_table is None else shape(self.block_table)[1] * shape(self.k)[2]


class MaskEmitter:
    """Builds what the operator is told of masks.

    Args:
        graph: where to.
        arguments: given to every operator.
    """

    def __init__(self, graph: Graph, arguments: Mapping[str, Any]) -> None:
        self.graph = graph
        self.arguments = arguments
        self.shared: dict[Any, Any] = {}

    def _masks(self, site: Site, q: Node, keys: Keys, writes: Writes) -> dict[str, Any]:
        """Arguments of the operator, by name; None where there is no such term."""
        terms, like = site.terms, site.anchor
        constant, tensor = self._offset(site, writes)
        streamed, padding = self._streamed(terms.streamed, like, writes), self._paddings(terms, q, keys, like, writes)
        return {
            "attn_mask": streamed,
            "key_padding": padding,
            "q_offset_tensor": tensor,
            "q_offset": constant or None,
            "window_left": terms.window_left,
            "window_right": terms.window_right,
            "softcap": site.softcap,
            "key_bounds": self._bounds(site, streamed, padding, q, keys, writes),
            "sinks": self._sinks(site, q),
            "alibi_slopes": self._alibi(terms, like, writes),
        }

    def _emit(self, target: Any, *args: Any, like: Node, **kwargs: Any) -> Node:
        return emit(self.graph, target, *args, like=like, **kwargs)

    def _arranged(self, x: Operand, like: Node) -> Node:
        """The operand in the operator's layout."""
        node = x.node
        for method, args in x.steps:
            node = self._emit(method, node, *args, like=like)
        return node

    def _cast(self, x: Node, dtype: torch.dtype, like: Node) -> Node:
        return x if value(x).dtype == dtype else self._emit("to", x, dtype, like=like)

    def _seqlen_k(self, keys: Keys, like: Node) -> Node:
        """How many keys there are, as the graph computes it."""
        length = self._emit("size", keys.k, 2, like=like)
        if keys.block_table is None:
            return length
        return self._emit(operator.mul, self._emit("size", keys.block_table, 1, like=like), length, like=like)

    def _sinks(self, site: Site, q: Node) -> Node | None:
        if not isinstance(site.sinks, float):
            return site.sinks
        return self._emit("new_full", q, (site.sizes[0],), site.sinks, dtype=torch.float32, like=site.anchor)

    def _alibi(self, terms: Terms, like: Node, writes: Writes) -> Node | None:
        if terms.alibi is None:
            return None
        slopes, factor = terms.alibi
        key = ("alibi", slopes, factor, writes.version(slopes, like), value(like).device)
        if key not in self.shared:
            wide = self._emit("to", self._here(slopes, like, writes), torch.float32, like=like)
            self.shared[key] = wide if factor == 1.0 else self._emit(operator.mul, wide, factor, like=like)
        return self.shared[key]

    def _bounds(
        self, site: Site, streamed: Node | None, padding: Node | None, q: Node, keys: Keys, writes: Writes
    ) -> Node | None:
        """Which keys each row can see by the intervals, and by masks that stay tensors, scanned once for all layers."""
        like, intervals = site.anchor, site.terms.intervals
        is_bias = streamed is not None and not _is_shared_by_heads(streamed)  # per head: every element is read anyway
        masks = [] if is_bias else [m for m in (streamed, padding) if m is not None]
        read = {x: self._snapshot(x, site, writes) for run in intervals for x in scalar_nodes(run)}
        read.update({x: self._here(x, like, writes) for run in intervals for x in tensor_nodes(run)})
        versions = (writes.version(m, like) if m in writes.position else 0 for m in masks)
        sizes = (value(like).device, str(shape(q)[2]), str(keys.seqlen_k))
        key = ("bounds", *masks, *versions, *intervals, *read.values(), is_bias, *sizes)
        if (masks or intervals) and key not in self.shared:
            bounds = [self._scanned(m, m is padding, keys, like) for m in masks]
            edges = EdgeEmitter(partial(self._emit, like=like), q, read)
            for run in intervals:
                stop = run.stop if run.stop is not None else Affine({self._seqlen_k(keys, like): 1})
                bounds.append(edges.bounds(run.first, stop, keys.k, plain=int(not is_bias)))
            self.shared[key] = self._fold(torch.minimum, bounds, like)
        return self.shared.get(key)

    def _scanned(self, mask: Node, is_padding: bool, keys: Keys, like: Node) -> Node:
        for _ in range(4 - len(shape(mask))):
            mask = self._emit("unsqueeze", mask, 1 if is_padding else 0, like=like)
        if str(shape(mask)[3]) != str(keys.seqlen_k):  # whole rows hidden, or one column for all keys
            mask = self._emit("expand", mask, -1, -1, -1, self._seqlen_k(keys, like), like=like)
        return self._emit(torch.ops.attnpatch.key_bounds.default, mask, like=like)

    def _offset(self, site: Site, writes: Writes) -> tuple[Any, Node | None]:
        """``terms.q_offset`` as an int (or SymInt node) and a tensor node."""
        total: Any = site.terms.q_offset.constant
        tensor: Any = None
        for atom, c in site.terms.q_offset.coefficients.items():
            if is_tensor(atom):
                atom = self._snapshot(atom, site, writes)
                tensor = self._sum(tensor, self._times(atom, c, site.anchor), site.anchor)
            else:
                total = self._sum(total or None, self._times(atom, c, site.anchor), site.anchor)
        return total, tensor

    def _times(self, node: Node, factor: float, like: Node) -> Node:
        return node if factor == 1 else self._emit(operator.mul, node, factor, like=like)

    def _sum(self, left: Any, right: Node, like: Node) -> Node:
        return right if left is None else self._emit(operator.add, left, right, like=like)

    def _snapshot(self, scalar: Node, site: Site, writes: Writes) -> Node:
        """The scalar as the mask read it: a static cache adds to its length before attention runs."""
        reader = site.readers.get(scalar)
        if reader is None or writes.between(scalar, reader, site.anchor) is None:
            return self._here(scalar, site.anchor, writes)
        if (scalar, reader) not in self.shared:
            with self.graph.inserting_before(reader):
                self.shared[scalar, reader] = self._emit("clone", scalar, like=reader)
        return self._here(self.shared[scalar, reader], site.anchor, writes)

    def _here(self, node: Node, like: Node, writes: Writes) -> Node:
        """A term on the device of the attention: of a model over several, one makes the masks of all."""
        device = value(like).device
        if not is_tensor(node) or value(node).device == device:
            return node
        version = writes.version(node, like) if node in writes.position else 0
        key = ("here", node, device, version)
        if key not in self.shared:
            self.shared[key] = self._emit("to", node, device, like=like)
        return self.shared[key]

    def _paddings(self, terms: Terms, q: Node, keys: Keys, like: Node, writes: Writes) -> Node | None:
        """The conjunction of the padding terms, bool ``[batch, seqlen_k]``."""
        versions = (writes.version(node, like) for node, _ in terms.paddings)
        key = (*terms.paddings, *versions, str(keys.seqlen_k), str(shape(q)[0]), value(like).device)
        if terms.paddings and key not in self.shared:
            moved = [(self._here(node, like, writes), first) for node, first in terms.paddings]
            parts = [self._padding(node, first, q, keys, like) for node, first in moved]
            total = parts[0]
            for part in parts[1:]:
                total = self._emit(operator.and_, total, part, like=like)
            self.shared[key] = total
        return self.shared.get(key) if terms.paddings else None

    def _padding(self, node: Node, first: Affine, q: Node, keys: Keys, like: Node) -> Node:
        if value(node).dtype != torch.bool:
            node = self._emit("to", node, torch.bool, like=like)
        if len(shape(node)) == 1:
            node = self._emit("unsqueeze", node, 0, like=like)
        if first != Affine() or str(shape(node)[1]) != str(keys.seqlen_k):
            start, length = self._scalar(first, like), self._seqlen_k(keys, like)
            node = self._emit("narrow", node, 1, start, length, like=like)
        if str(shape(node)[0]) != str(shape(q)[0]):
            node = self._emit("expand", node, self._emit("size", q, 0, like=like), -1, like=like)
        return node

    def _scalar(self, expression: Affine, like: Node) -> Any:
        """An expression of SymInt nodes as a node, or its constant."""
        total: Any = expression.constant or None
        for atom, c in expression.coefficients.items():
            total = self._sum(total, self._times(atom, c, like), like)
        return total or 0

    def _streamed(self, masks: list[Streamed], like: Node, writes: Writes) -> Node | None:
        """One mask that has the effect of all: bool if all are, else additive with -inf where a bool hides."""
        key = (*masks, *(writes.version(mask.node, like) for mask in masks), value(like).device)
        if not masks:
            return None
        if key not in self.shared:
            keep = [self._here(self._keep(m, like), like, writes) for m in masks if m.kind != "additive"]
            bias = [self._here(self._bias(m, like), like, writes) for m in masks if m.kind == "additive"]
            total = self._fold(operator.add, bias, like)
            visible = self._fold(operator.and_, keep, like)
            if total is not None and visible is not None:
                hidden = self._emit("logical_not", visible, like=like)
                total = self._emit("masked_fill", total, hidden, -torch.inf, like=like)
            self.shared[key] = visible if total is None else total
        return self.shared[key]

    def _fold(self, target: Any, nodes: list[Node], like: Node) -> Node | None:
        total: Node | None = None
        for node in nodes:
            total = node if total is None else self._emit(target, total, node, like=like)
        return total

    def _keep(self, mask: Streamed, like: Node) -> Node:
        node = self._arranged(mask.mask, like)
        return node if mask.kind == "keep" else self._emit("logical_not", node, like=like)

    def _bias(self, mask: Streamed, like: Node) -> Node:
        node = self._arranged(mask.mask, like)
        if not value(node).is_floating_point():
            node = self._emit("float", node, like=like)
        return node if mask.factor == 1.0 else self._emit(operator.mul, node, mask.factor, like=like)


def _is_shared_by_heads(mask: Node) -> bool:
    return len(shape(mask)) < 3 or (isinstance(shape(mask)[-3], int) and shape(mask)[-3] == 1)
