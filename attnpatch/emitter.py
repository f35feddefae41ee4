"""Put the operator of a site into its graph: arguments, what layers share, what becomes dead."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._dynamo.source import ConstantSource
from torch.fx import Graph, Node

from attnpatch.affine import Affine
from attnpatch.attention_call import PACKED
from attnpatch.edges import EdgeEmitter, scalar_nodes, tensor_nodes
from attnpatch.graph import Writes, breaks_a_view, emit, erase_dead, is_tensor, op, shape, value
from attnpatch.rule import Operand, Scaling, Site, Storage, Streamed, Terms, Turn


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


class Emitter:
    """Builds the operator's arguments in a graph; what several layers share is built once."""

    def __init__(self, graph: Graph, arguments: Mapping[str, Any]) -> None:
        self.graph = graph
        self.arguments = arguments
        self.shared: dict[Any, Any] = {}

    def replace(self, site: Site, writes: Writes) -> None:
        """Put the operator right before the site's anchor, hand it the readers, erase what became dead."""
        with self.graph.inserting_before(site.before or site.anchor):
            o, lse = self._operator(site, writes)
            o = self._turned(o, site.storage.v_turn, site.anchor)
            if site.storage.v_turn.factor != 1.0:
                o = self._emit(operator.mul, o, site.storage.v_turn.factor, like=site.anchor)
            o = self._arranged(Operand(o, (), site.output), site.anchor)
            o = self._cast(o, value(site.anchor).dtype, site.anchor)
            if lse is not None and site.lse is not None:
                lse = self._arranged(site.lse._replace(node=lse), site.anchor)
                lse = self._cast(lse, value(site.lse.node).dtype, site.anchor)
            if breaks_a_view(value(o), site.anchor):
                o = self._laid_out(o, site.anchor)
        site.anchor.replace_all_uses_with(o)
        if lse is not None and site.lse is not None:
            site.lse.node.replace_all_uses_with(lse)
            erase_dead(self.graph, [site.lse.node])
        for node in site.interior:
            _erase_unread(self.graph, node, {*site.interior, site.anchor})
        erase_dead(self.graph, [site.anchor, *reversed(site.interior)])
        for node in reversed(site.storage.unpacked):
            _erase_checks(self.graph, node)

    def _emit(self, target: Any, *args: Any, like: Node, **kwargs: Any) -> Node:
        return emit(self.graph, target, *args, like=like, **kwargs)

    def _laid_out(self, o: Node, like: Node) -> Node:
        """``o`` copied into the memory order of ``like``, which a view behind it counts on."""
        strides = value(like).stride()
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        if order == sorted(order):
            return self._emit("contiguous", o, like=like)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        ordered = self._emit("contiguous", self._emit("permute", o, order, like=like), like=like)
        return self._emit("permute", ordered, inverse, like=like)

    def _arranged(self, x: Operand, like: Node) -> Node:
        """The operand in the operator's layout."""
        node = x.node
        for method, args in x.steps:
            node = self._emit(method, node, *args, like=like)
        return node

    def _query(self, site: Site) -> Node:
        """q, with scales known only at run time applied to it."""
        like, q = site.anchor, self._arranged(site.q, site.anchor)
        for scale, kind in site.scales:
            factor = self._arranged(scale, like)
            q = self._emit(operator.mul if kind == "mul" else operator.truediv, q, factor, like=like)
        return self._turned(self._cast(q, site.storage.dtype, like), site.storage.k_turn.inverse, like)

    def _cast(self, x: Node, dtype: torch.dtype, like: Node) -> Node:
        return x if value(x).dtype == dtype else self._emit("to", x, dtype, like=like)

    def _turned(self, x: Node, turn: Turn, like: Node) -> Node:
        """``x`` with its channels in another order, or multiplied with an orthogonal matrix; never the factor."""
        if turn.order is not None:
            return self._emit("index_select", x, 3, self._constant("channels", turn.order, x, like), like=like)
        if turn.matrix is None:
            return x
        matrix = self._constant("turn", turn.matrix.float(), x, like)
        wide = self._emit(operator.matmul, self._emit("float", x, like=like), matrix, like=like)
        return self._emit("to", wide, value(x).dtype, like=like)

    def _constant(self, name: str, tensor: torch.Tensor, x: Node, like: Node) -> Node:
        """A tensor as an attribute of the graph, on the device of ``x``."""
        device = value(x).device
        key = (name, tensor.numpy().tobytes(), device)
        if key not in self.shared:
            first = next(n for n in self.graph.nodes if n.op != "placeholder")
            with self.graph.inserting_before(first):
                self.shared[key] = constant(self.graph, name, tensor.to(device), like=like)
        return self.shared[key]

    def _keys(self, site: Site, writes: Writes) -> Keys:
        """K, V and what tells how they lie in memory."""
        like, stored = site.anchor, site.storage
        k, v = self._arranged(site.k, like), self._arranged(site.v, like)
        k = self._cast(k, stored.dtype, like) if stored.k_scales is None else k
        v = self._cast(v, stored.dtype, like) if stored.v_scales is None else v
        k_scale, k_shift = self._scale(stored.k_scales, stored.k_scaling, k, like)
        v_scale, v_shift = self._scale(stored.v_scales, stored.v_scaling, v, like)
        return Keys(k, v, self._block_table(stored, k, like, writes), k_scale, v_scale, k_shift, v_shift)

    def _block_table(self, stored: Storage, k: Node, like: Node, writes: Writes) -> Node | None:
        table = stored.block_table
        if table is None:
            return None
        key = ("table", table, stored.counts_back, writes.version(table.node, like), str(shape(k)[0]))
        if key not in self.shared:
            ids = self._arranged(table, like)
            if stored.counts_back:  # kernels take a negative id for one of a page that no row sees
                ids = self._emit("remainder", ids, self._emit("size", k, 0, like=like), like=like)
            self.shared[key] = ids
        return self.shared[key]

    def _scale(
        self, scales: list[Operand] | None, scaling: Scaling | None, codes: Node, like: Node
    ) -> tuple[Node | None, Node | None]:
        """The scale of K or V and its shift, None where it has none."""
        if scales is None:
            return None, None
        if scaling is not None:
            return self._scaled(scaling, [self._arranged(x, like) for x in scales], like)
        if value(codes).dtype == PACKED:
            return self._arranged(scales[0], like), None
        return self._product(scales, like), None

    def _scaled(self, scaling: Scaling, given: list[Node], like: Node) -> tuple[Node, Node]:
        """Scales and shifts of integers of 4 bits: as they are, or worked out in float32."""
        if scaling == Scaling(1.0, 0.0, 1.0) and value(given[0]).dtype == value(given[1]).dtype:
            return given[0], given[1]
        scale, *others = (self._cast(x, torch.float32, like) for x in given)
        parts = [(scaling.of_scale, scale)]
        if others:
            both = self._emit(operator.mul, scale, others[0], like=like) if scaling.of_both else scale
            parts += [(scaling.of_other, others[0]), (scaling.of_both, both)]
        terms = [self._times(x, factor, like) for factor, x in parts if factor]
        shift = self._fold(operator.add, terms, like) or self._emit("new_zeros", scale, (1, 1, 1, 1), like=like)
        return self._times(scale, scaling.step, like), shift

    def _product(self, scales: list[Operand], like: Node) -> Node:
        """The product of the scales in float32, broadcastable to the rows; ones where there is none."""
        numbers = [x.node for x in scales if not is_tensor(x.node)]
        total: Node | None = None
        for scale in (x for x in scales if is_tensor(x.node)):
            part = self._emit("to", self._arranged(scale, like), torch.float32, like=like)
            total = part if total is None else self._emit(operator.mul, total, part, like=like)
        if total is None:
            device = value(like).device
            return self._emit(torch.full, (1, 1, 1), math.prod(numbers), dtype=torch.float32, device=device, like=like)
        return self._emit(operator.mul, total, math.prod(numbers), like=like) if numbers else total

    def _seqlen_k(self, keys: Keys, like: Node) -> Node:
        """How many keys there are, as the graph computes it."""
        length = self._emit("size", keys.k, 2, like=like)
        if keys.block_table is None:
            return length
        return self._emit(operator.mul, self._emit("size", keys.block_table, 1, like=like), length, like=like)

    def _operator(self, site: Site, writes: Writes) -> tuple[Node, Node | None]:
        """The operator's output, and its lse where the site wants it."""
        terms, like = site.terms, site.anchor
        q, keys = self._query(site), self._keys(site, writes)
        constant, tensor = self._offset(site, writes)
        streamed, padding = self._streamed(terms.streamed, like, writes), self._paddings(terms, q, keys, like, writes)
        given: dict[str, Any] = {
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
            "block_table": keys.block_table,
            "k_scale": keys.k_scale,
            "v_scale": keys.v_scale,
            "k_shift": keys.k_shift,
            "v_shift": keys.v_shift,
            **self.arguments,
        }
        given = {name: x for name, x in given.items() if x is not None}
        tensors = (q, keys.k, keys.v, site.sm_scale * site.storage.k_turn.factor)
        if site.lse is None:
            return self._emit(torch.ops.attnpatch.attention.default, *tensors, like=like, **given), None
        both = self._emit(torch.ops.attnpatch.attention_lse.default, *tensors, like=like, **given)
        return self._emit(operator.getitem, both, 0, like=like), self._emit(operator.getitem, both, 1, like=like)

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


def _erase_unread(graph: Graph, node: Node, inside: set[Node]) -> None:
    """Erase what reads ``node`` and is read by nobody itself: it would keep all of attention alive."""
    for user in [] if node._erased else list(node.users):
        if user not in inside and not user._erased:
            _erase_unread(graph, user, inside)
            erase_dead(graph, [user])


def _erase_checks(graph: Graph, node: Node) -> None:
    """Erase checks of a tensor's dtype, which torch.export writes: they would keep it alive."""
    checks = [] if node._erased else [x for x in node.users if op(x) == "_assert_tensor_metadata"]
    if checks and len(checks) == len(node.users):
        erase_dead(graph, checks)


def constant(graph: Graph, name: str, tensor: torch.Tensor, like: Node) -> Node:
    """A tensor as an attribute of the graph's module."""
    module: Any = graph.owning_module
    numbers = (i for i in itertools.count() if not hasattr(module, f"_attnpatch_{name}_{i}"))
    target = f"_attnpatch_{name}_{next(numbers)}"
    module.register_buffer(target, tensor, persistent=False)
    if hasattr(module, "_param_name_to_source"):  # Dynamo's: AOTAutograd asks where each buffer is from
        module._param_name_to_source[target] = ConstantSource(target)
    node = graph.get_attr(target)
    with value(like).fake_mode as mode:
        node.meta["example_value"] = mode.from_tensor(tensor)
    return node


def _is_shared_by_heads(mask: Node) -> bool:
    return len(shape(mask)) < 3 or (isinstance(shape(mask)[-3], int) and shape(mask)[-3] == 1)
